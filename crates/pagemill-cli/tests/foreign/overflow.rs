//! A program whose stack overflows. Rust's runtime reports that and ends the program.
#[inline(never)]
fn recurse(depth: u64) -> u64 {
    let block = std::hint::black_box([depth; 64]);
    recurse(depth + 1) + block[(depth % 64) as usize]
}

fn main() {
    println!("{}", recurse(0));
}
