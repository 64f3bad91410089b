// A library that allocates when it is loaded, and frees when it is unloaded.
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

static std::vector<std::string> words(1000, std::string(100, 'x'));
static std::map<int, std::vector<char>> blocks;
static void *raw;

// The constructor runs after those of the objects above.
static struct Loaded {
    Loaded() {
        raw = std::malloc(300000);
        std::memset(raw, 1, 300000);
        for (int i = 0; i < 20; i++)
            blocks[i].resize(i * 20000);
    }
} loaded;

__attribute__((destructor)) static void unloaded() {
    std::free(raw);
}

extern "C" size_t plugin_sum() {
    size_t sum = 0;
    for (auto &word : words)
        sum += word.size();
    for (auto &block : blocks)
        sum += block.second.size();
    return sum;
}

// The program frees this block after it has unloaded the library.
extern "C" void *plugin_gift(size_t size) {
    return std::malloc(size);
}
