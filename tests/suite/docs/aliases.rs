//! A search of the documentation for a driver call finds the items that make the call.

use std::fs;

use super::root;

/// The driver calls in the `Driver call` paragraph of a doc comment.
fn driver_calls(doc: &str) -> Vec<&str> {
    let Some((_, calls)) = doc.split_once("Driver call") else { return Vec::new() };
    let paragraph = calls.split("\n\n").next().unwrap();
    paragraph.split('`').skip(1).step_by(2).filter(|code| code.starts_with("cu")).collect()
}

#[test]
fn driver_calls_are_aliases() {
    let (mut checked, mut missing) = (0, Vec::new());
    for folder in
        ["driver/mod.rs", "memory", "broker/client", "session", "session/handoff", "session/stream", "weights"]
    {
        let path = root().join("src").join(folder);
        let files = match path.is_dir() {
            true => fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect(),
            false => vec![path],
        };
        for file in files.iter().filter(|file| file.is_file()) {
            let (mut doc, mut attributes) = (String::new(), String::new());
            for line in fs::read_to_string(file).unwrap().lines().map(str::trim) {
                if let Some(text) = line.strip_prefix("///") {
                    doc = doc + text.trim() + "\n";
                    continue;
                }
                attributes += line;
                if line.starts_with("#[") {
                    continue;
                }
                let calls = if line.starts_with("pub ") { driver_calls(&doc) } else { Vec::new() };
                checked += calls.len();
                missing.extend(
                    calls
                        .iter()
                        .filter(|call| !attributes.contains(&format!("\"{call}\"")))
                        .map(|call| format!("{}: `{line}` needs #[doc(alias = \"{call}\")]", file.display())),
                );
                (doc, attributes) = (String::new(), String::new());
            }
        }
    }
    assert!(checked > 50, "{checked}");
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}
