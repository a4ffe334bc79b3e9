//! A reader who follows the pages in order meets no trap.

use super::{Page, blocks, source};

#[test]
fn readme_stops_broker_after_last_use() {
    let page = source("README.md");
    let (_, after) = page.split_once("```python\n").unwrap();
    assert_eq!((page.matches("kill %1").count(), after.matches("kill %1").count()), (1, 1));
}

#[test]
fn pages_install_numpy_with_the_wheel() {
    for page in ["README.md", "docs/python.md"].map(Page::read) {
        let (_, blocks) = blocks::read(&page.text);
        let block = blocks.iter().find(|block| block.lines.contains(&"make wheel")).unwrap();
        assert!(block.lines.contains(&"pip install numpy"), "{}:{}", page.path, block.line);
    }
}

#[test]
fn readme_leaves_no_untracked_file() {
    let page = Page::read("README.md");
    let (_, blocks) = blocks::read(&page.text);
    let lines = blocks.iter().filter(|block| block.language == "sh").flat_map(|block| &block.lines);
    let created = lines.filter_map(|line| {
        let (_, file) = [" > ", " --to ", "-m venv "].iter().find_map(|before| line.split_once(before))?;
        file.split(' ').next()
    });
    let created: Vec<&str> = created.collect();
    assert_eq!(created, ["weights.bin", "copy.bin", "venv"]);
    let ignored = source(".gitignore");
    let is_ignored = |name: &&&str| ignored.lines().any(|line| line.trim_matches('/') == **name);
    assert_eq!(created.iter().filter(is_ignored).count(), created.len(), "{ignored}");
}
