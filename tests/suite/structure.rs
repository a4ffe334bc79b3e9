//! The structure of the sources: allowed dependencies between the library's folders, no cycles, and limits for files and functions.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Each folder or file of `src/`, with the folders and files whose paths it may name. `lib.rs` declares all of them, and `internals.rs`
/// exports them to the project's own programs.
const LAYERS: [(&str, &[&str]); 15] = [
    ("error", &[]),
    ("base", &["error"]),
    ("array", &["base", "error"]),
    ("sys", &["array", "error"]),
    ("wire", &["array", "base", "error"]),
    ("driver", &["base", "error", "sys"]),
    ("channel", &["error", "sys", "wire"]),
    ("memory", &["array", "base", "driver", "error", "sys"]),
    ("encoding", &["array", "error", "memory", "wire"]),
    ("session", &["array", "channel", "driver", "error", "memory", "wire"]),
    ("weights", &["array", "driver", "error", "memory", "wire"]),
    ("broker", &["array", "channel", "driver", "error", "memory", "sys", "wire"]),
    ("bindings", &["array", "driver", "error", "memory", "session", "sys"]),
    ("launch", &["driver", "error", "memory"]),
    ("must_not_compile", &[]),
];

/// Only `driver` may name these paths: users of a driver do not know its backend.
const BACKENDS: [&str; 2] = ["driver::cuda", "driver::host"];

/// The crates whose files must form no cycles. `python/tests/test_structure.py` checks the Python package and its extension.
const CRATES: [&str; 6] = ["src", "bin/src", "capi/src", "tests/bench/src", "tests/fakecuda/src", "tests/suite"];

/// The folders of the Rust and Python sources.
const SOURCES: [&str; 7] = ["src", "bin", "capi", "examples", "python", "scripts", "tests"];

/// A source file without its comments and unit tests.
struct File {
    name: String,
    module: Vec<String>,
    lines: Vec<String>,
    /// Each path of this crate in the file, with its line and its local name.
    paths: Vec<(usize, Vec<String>, String)>,
}

impl File {
    fn read(root: &Path, path: &Path) -> Self {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let mut module: Vec<String> = name.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        module.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let lines: Vec<String> = code.lines().map(|line| line.split("//").next().unwrap().to_owned()).collect();
        let mut file = Self { name, module, lines, paths: Vec::new() };
        let tokens = file.tokens();
        let mut at = 0;
        while at < tokens.len() {
            let begins = ["crate", "super", "self"].contains(&tokens[at].1.as_str());
            let is_path = begins && tokens.get(at + 1).is_some_and(|next| next.1 == "::");
            at = if is_path { file.take_path(&tokens, at, &[]) } else { at + 1 };
        }
        file
    }

    /// Splits the source into identifiers, `::` and other characters, each with its line.
    fn tokens(&self) -> Vec<(usize, String)> {
        let mut tokens = Vec::new();
        for (number, line) in (1..).zip(&self.lines) {
            let mut rest = line.trim_start();
            while let Some(first) = rest.chars().next() {
                let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                let length = if rest.starts_with("::") { 2 } else { word.max(first.len_utf8()) };
                tokens.push((number, rest[..length].to_owned()));
                rest = rest[length..].trim_start();
            }
        }
        tokens
    }

    /// Parses a path, or each path of a group, after `prefix`. Returns the index of the next token.
    fn take_path(&mut self, tokens: &[(usize, String)], mut at: usize, prefix: &[String]) -> usize {
        let (mut path, line) = (prefix.to_vec(), tokens[at].0);
        let token = |at: usize| tokens.get(at).map_or("", |token| token.1.as_str());
        loop {
            match token(at) {
                "{" => {
                    at += 1;
                    while !["}", ""].contains(&token(at)) {
                        at = if token(at) == "," { at + 1 } else { self.take_path(tokens, at, &path) };
                    }
                    return at + 1;
                }
                "super" if path.is_empty() => path = self.module[..self.module.len().saturating_sub(1)].to_vec(),
                "super" => drop(path.pop()),
                "crate" => {}
                "self" if path.is_empty() => path = self.module.clone(),
                "self" => {}
                segment => path.push(segment.to_owned()),
            }
            if token(at + 1) != "::" {
                break;
            }
            at += 2;
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if token(at + 1) == "as" {
            name = token(at + 2).to_owned();
            at += 2;
        }
        self.paths.push((line, path, name));
        at + 1
    }

    fn is_face(&self) -> bool {
        self.name.ends_with("mod.rs") || ["lib.rs", "main.rs", "internals.rs"].contains(&self.name.as_str())
    }
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

fn files(of: &str) -> BTreeMap<Vec<String>, File> {
    let folder = root().join(of);
    let files = below(&folder, &["rs"]).into_iter().map(|path| File::read(&folder, &path));
    files.map(|file| (file.module.clone(), file)).collect()
}

/// The texts of all sources, with their paths.
fn sources(extensions: &[&str]) -> Vec<(String, String)> {
    let root = root();
    let paths = SOURCES.iter().flat_map(|folder| below(&root.join(folder), extensions));
    let texts = paths.map(|path| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&path).unwrap();
        (name, text)
    });
    let texts: Vec<_> = texts.collect();
    assert!(texts.len() > 300, "{}", texts.len());
    texts
}

/// Returns the module that defines the item of a path, following re-exports.
fn defined_in<'a>(files: &'a BTreeMap<Vec<String>, File>, path: &[String], depth: u8) -> Option<&'a File> {
    let length = (0..=path.len()).rev().find(|length| files.contains_key(&path[..*length]))?;
    let file = &files[&path[..length]];
    let exported = path.get(length).and_then(|name| file.paths.iter().find(|(_, _, alias)| alias == name));
    match exported {
        Some((_, target, _)) if depth > 0 && target[..] != path[..=length] && target.len() > 1 => {
            defined_in(files, &[target, &path[length + 1..]].concat(), depth - 1)
        }
        _ => Some(file),
    }
}

#[track_caller]
fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn files_use_only_lower_layers() {
    let (files, layers) = (files("src"), BTreeMap::from(LAYERS));
    let mut problems = Vec::new();
    for file in files.values().filter(|file| !["lib.rs", "internals.rs"].contains(&file.name.as_str())) {
        let own = file.module[0].as_str();
        let allowed = layers.get(own).unwrap_or_else(|| panic!("src/{}: `{own}` is in no layer", file.name));
        for (line, path, _) in &file.paths {
            let Some(first) = path.first() else { continue };
            let exported = || defined_in(&files, path, 4).and_then(|file| file.module.first()).cloned();
            let used = if layers.contains_key(first.as_str()) { Some(first.clone()) } else { exported() };
            if let Some(used) = used.filter(|used| used != own && !allowed.contains(&used.as_str())) {
                problems.push(format!("src/{}:{line}: `{own}` must not use `{used}` ({})", file.name, path.join("::")));
            }
            if own != "driver" && BACKENDS.contains(&path[..path.len().min(2)].join("::").as_str()) {
                problems.push(format!("src/{}:{line}: only `driver` knows a backend ({})", file.name, path.join("::")));
            }
        }
    }
    assert_none(&problems);
}

/// Returns the files of a crate that depend on each other in a circle. A folder's `mod.rs` and the folder's other files may name each other,
/// as `mod.rs` is their interface.
fn circles(of: &str) -> Vec<String> {
    let files = files(of);
    let uses = |file: &File| -> BTreeSet<&Vec<String>> {
        let targets = file.paths.iter().filter_map(|(_, path, _)| defined_in(&files, path, 4));
        targets
            .filter(|target| target.module != file.module && !target.is_face())
            .map(|target| &target.module)
            .collect()
    };
    let mut left: BTreeMap<&Vec<String>, BTreeSet<&Vec<String>>> =
        files.values().filter(|file| !file.is_face()).map(|file| (&file.module, uses(file))).collect();
    // A file without a remaining dependency, or without a remaining user, is in no cycle.
    let mut before = usize::MAX;
    while left.len() < before {
        before = left.len();
        let used: BTreeSet<&Vec<String>> = left.values().flatten().copied().collect();
        let known: BTreeSet<&Vec<String>> = left.keys().copied().collect();
        left.retain(|module, uses| used.contains(module) && !uses.is_disjoint(&known));
    }
    let name = |module: &Vec<String>| files[module].name.clone();
    let problems = left.iter().map(|(module, uses)| {
        let uses: Vec<String> = uses.iter().filter(|used| left.contains_key(*used)).map(|used| name(used)).collect();
        format!("{of}/{}: in a circle through {}", name(module), uses.join(", "))
    });
    problems.collect()
}

#[test]
fn files_form_no_circles() {
    assert_none(&CRATES.map(circles).concat());
}

#[test]
fn long_files_give_a_reason() {
    let mut problems = Vec::new();
    for (name, text) in sources(&["rs", "py"]) {
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//") && !line.starts_with('#');
        let lines = code.lines().map(str::trim).filter(is_code).count();
        if lines > 500 && !text.lines().take(12).any(|line| line.contains("500 lines")) {
            problems.push(format!(
                "{name}: {lines} lines: split it, or say in its first lines why it has more than 500 lines"
            ));
        }
    }
    assert_none(&problems);
}

#[test]
fn functions_have_at_most_80_lines() {
    let mut problems = Vec::new();
    for (name, text) in sources(&["rs"]) {
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let indent = &line[..line.len() - line.trim_start().len()];
            let words: Vec<&str> = line
                .split_whitespace()
                .filter(|word| *word != "\"C\"")
                .take_while(|word| !word.contains('"'))
                .collect();
            // Not comments, and no function of a macro, which the macro's users write.
            let is_declared = !line.trim_start().starts_with("//") && !line.contains('$');
            let is_function = is_declared
                && words.iter().take(5).any(|word| *word == "fn")
                && line.trim_end().ends_with(['{', '(', '>']);
            let end = format!("{indent}}}");
            let length = lines[at..].iter().position(|line| *line == end).map_or(0, |length| length + 1);
            if is_function && length > 80 {
                problems.push(format!("{name}:{}: a function of {length} lines, and at most 80 are allowed", at + 1));
            }
        }
    }
    assert_none(&problems);
}
