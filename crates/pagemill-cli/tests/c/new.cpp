// C++ operators on top of malloc: new, aligned new, nothrow new, containers that grow, bad_alloc.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            std::_Exit(99);                                                  \
        }                                                                    \
    } while (0)

// The address of each allocation is stored here, so that the compiler cannot remove the allocation.
static char *volatile sink;

struct alignas(4096) Page {
    char bytes[4096];
};
struct alignas(64) Line {
    char bytes[64];
};

static void containers() {
    std::vector<uint64_t> numbers;
    for (uint64_t i = 0; i < 20000000; i++)
        numbers.push_back(i * 7);
    for (uint64_t i = 0; i < numbers.size(); i += 1000)
        CHECK(numbers[i] == i * 7);
    std::map<std::string, std::vector<int>> words;
    for (int i = 0; i < 100000; i++)
        words[std::to_string(i % 5000)].push_back(i);
    CHECK(words.size() == 5000 && words["77"].size() == 20);
    std::unordered_map<int, std::string> table;
    for (int i = 0; i < 100000; i++)
        table[i] = std::string(i % 200, 'y');
    CHECK(table[150].size() == 150);
    std::string text;
    while (text.size() < 50000000)
        text += "some words ";
    CHECK(text[text.size() - 1] == ' ');
}

int main() {
    for (int round = 0; round < 100; round++) {
        auto line = std::make_unique<Line[]>(1 + round * 50);
        auto page = std::make_unique<Page[]>(1 + round);
        Page *single = new Page;
        CHECK(reinterpret_cast<uintptr_t>(line.get()) % 64 == 0);
        CHECK(reinterpret_cast<uintptr_t>(page.get()) % 4096 == 0);
        CHECK(reinterpret_cast<uintptr_t>(single) % 4096 == 0);
        delete single;
        char *zero = new char[0];
        CHECK(zero);
        delete[] zero;
    }
    volatile size_t impossible = SIZE_MAX / 4;
    CHECK(!new (std::nothrow) char[impossible]);
    bool is_thrown = false;
    try {
        char *memory = new char[impossible];
        sink = memory;
    } catch (const std::bad_alloc &) {
        is_thrown = true;
    }
    CHECK(is_thrown);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++)
        threads.emplace_back(containers);
    for (auto &thread : threads)
        thread.join();
    return 0;
}
