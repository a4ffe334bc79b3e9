//! Names in the pages exist: tests, errors, versions, numbers.

use std::fs;

use super::{Page, root, source};

#[test]
fn each_guarantee_names_test_files() {
    let page = Page::read("docs/guarantees.md");
    let sections: Vec<&str> = page.text.split("\n## ").skip(1).collect();
    assert!(sections.len() > 4);
    for section in sections {
        let (_, tests) = section.split_once("\nTests: ").unwrap_or_else(|| panic!("no tests: {section}"));
        for name in tests.split('`').skip(1).step_by(2) {
            let paths = [root().join("tests/suite").join(name.trim_end_matches('*')), root().join(name)];
            let exists = paths.iter().any(|path| path.exists()) || paths[0].with_extension("rs").exists();
            assert!(exists, "docs/guarantees.md names {name}, which does not exist");
        }
    }
}

/// The error texts of the library and the commands, and the driver's error codes.
fn texts_of_errors() -> Vec<String> {
    let mut texts = Vec::new();
    let mut folders = ["src", "bin/src"].map(|folder| root().join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                texts.push(fs::read_to_string(path).unwrap());
            }
        }
    }
    texts
}

#[test]
fn diagnose_page_quotes_the_errors() {
    let page = Page::read("docs/diagnose.md");
    let (_, section) = page.text.split_once("## Error messages").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let phrases: Vec<&str> = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert!(phrases.len() > 10);
    let texts = texts_of_errors();
    for phrase in phrases {
        assert!(texts.iter().any(|text| text.contains(phrase)), "no error says `{phrase}`");
    }
}

#[test]
fn readme_numbers_were_measured() {
    let readme = Page::read("README.md");
    let (_, section) = readme.text.split_once("| the first process").unwrap();
    let (section, _) = section.split_once("\n\n").unwrap();
    let measured = source("docs/performance.md");
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| c.is_whitespace() || [',', ';', ':', '·', '|', '(', ')'].contains(&c))
            .map(|word| word.trim_end_matches('.').to_owned())
            .collect()
    };
    let known = words(&measured);
    let numbers: Vec<String> =
        words(section).into_iter().filter(|word| word.parse::<f64>().is_ok() && word.len() > 1).collect();
    assert!(numbers.len() >= 8, "{numbers:?}");
    for number in numbers {
        assert!(known.contains(&number), "{number} is not in docs/performance.md");
    }
}

#[test]
fn versions_match_the_manifest() {
    let manifest = source("Cargo.toml");
    let rust = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap().trim_matches('"');
    for page in ["README.md", "docs/CONTRIBUTING.md"] {
        assert!(source(page).contains(&format!("Rust {rust}")), "{page}: Rust {rust}");
    }
    let tools = manifest.split_once("\nbindings = [").unwrap().1.split_once(']').unwrap().0;
    let bindings = tools.split_once("cudarc/cuda-").unwrap().1.split_once('"').unwrap().0.parse::<u32>().unwrap();
    let version = format!("bindings of CUDA {}.{}", bindings / 1000, bindings % 1000 / 10);
    assert!(source("docs/library.md").contains(&version), "{version}");
    let release = manifest.lines().find_map(|line| line.strip_prefix("version = ")).unwrap().trim_matches('"');
    assert!(source("CHANGELOG.md").contains(&format!("\n## {release}\n")), "the changelog has no {release}");
}
