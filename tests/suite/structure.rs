//! The structure of the sources: allowed dependencies between the folders of the library.

use crate::support::prelude::*;

/// Each folder or file of `src/`, with the folders and files whose paths it may name. `lib.rs` declares all of them, and `internals.rs`
/// exports them to the project's own programs.
const LAYERS: [(&str, &[&str]); 16] = [
    ("error", &[]),
    ("base", &["error"]),
    ("array", &["base", "error"]),
    ("sys", &["array", "error"]),
    ("wire", &["array", "base", "error"]),
    ("driver", &["base", "error", "sys"]),
    ("channel", &["error", "sys", "wire"]),
    ("memory", &["array", "base", "driver", "error", "sys"]),
    ("encoding", &["array", "error", "memory", "wire"]),
    ("session", &["array", "channel", "driver", "error", "memory", "sys", "wire"]),
    ("weights", &["array", "driver", "error", "memory", "sys", "wire"]),
    ("broker", &["array", "channel", "driver", "error", "memory", "sys", "wire"]),
    ("topic", &["broker", "channel", "driver", "error", "memory", "session", "sys"]),
    ("bindings", &["array", "driver", "error", "memory", "session", "sys"]),
    ("launch", &["driver", "error", "memory"]),
    ("must_not_compile", &[]),
];

/// Only `driver` may name these paths: users of a driver do not know its backend.
const BACKENDS: [&str; 2] = ["driver::cuda", "driver::host"];

/// The source of a file without its comments and unit tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    code.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The paths at the start of a text. A group has several: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(text: &str) -> Vec<String> {
    let end = text.find(|c: char| !c.is_alphanumeric() && !['_', ':'].contains(&c)).unwrap_or(text.len());
    let (head, rest) = text.split_at(end);
    let Some(group) = rest.strip_prefix('{') else { return vec![head.to_owned()] };
    let (mut depth, mut begin, mut items) = (1, 0, Vec::new());
    for (at, c) in group.char_indices() {
        depth = match c {
            '{' => depth + 1,
            '}' => depth - 1,
            _ => depth,
        };
        if depth == 0 || depth == 1 && c == ',' {
            items.push(group[begin..at].trim());
            begin = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    items.into_iter().flat_map(paths).map(|path| format!("{head}{path}")).collect()
}

/// The project's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Lists the files below a folder with one of these extensions.
fn below(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let (mut folders, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if extensions.iter().any(|each| entry.extension().is_some_and(|extension| extension == *each)) {
                files.push(entry);
            }
        }
    }
    files
}

#[track_caller]
fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn files_use_only_lower_layers() {
    let (folder, layers) = (root().join("src"), BTreeMap::from(LAYERS));
    let (mut problems, mut seen) = (Vec::new(), 0);
    for path in below(&folder, &["rs"]) {
        let name = path.strip_prefix(&folder).unwrap().to_str().unwrap();
        let own = name.trim_end_matches(".rs").split('/').next().unwrap();
        if ["lib", "internals"].contains(&own) {
            continue;
        }
        let allowed = layers.get(own).unwrap_or_else(|| panic!("src/{name}: `{own}` is in no layer"));
        for used in code(&fs::read_to_string(&path).unwrap()).split("crate::").skip(1).flat_map(paths) {
            let first = used.split("::").next().unwrap();
            seen += 1;
            if layers.contains_key(first) && first != own && !allowed.contains(&first) {
                problems.push(format!("src/{name}: `{own}` must not use `{used}`"));
            }
            if own != "driver" && BACKENDS.iter().any(|backend| used.starts_with(backend)) {
                problems.push(format!("src/{name}: only `driver` knows a backend ({used})"));
            }
        }
    }
    assert!(seen > 500, "{seen}");
    assert_none(&problems);
}
