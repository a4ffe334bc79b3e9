//! The committed header, and the list of symbols.

use std::{collections::BTreeSet, env, fs, path::Path};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Compares a committed file, or rewrites it if `UPDATE_DOCS` is set.
fn check(path: &str, generated: &str) {
    let path = Path::new(ROOT).join(path);
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, generated).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "{} differs from the source: run `UPDATE_DOCS=1 cargo test -p vmmfd-capi`",
        path.display()
    );
}

/// The topics of the header in order: a title, and the source files with its declarations.
const TOPICS: [(&str, &[&str]); 10] = [
    ("Errors, version and log", &["error", "library"]),
    ("Devices", &["device"]),
    ("Memory", &["memory"]),
    ("Arrays", &["array"]),
    ("Handoffs between two processes", &["handoff"]),
    ("Order of GPU work", &["timeline"]),
    ("Streams", &["publisher", "subscriber", "format"]),
    ("Brokers", &["broker", "get", "listing", "recall"]),
    ("Leases", &["lease"]),
    ("Watches", &["watch"]),
];

fn header() -> String {
    let mut config = cbindgen::Config::from_file(Path::new(ROOT).join("cbindgen.toml")).unwrap();
    let version: Vec<&str> = env!("CARGO_PKG_VERSION").split('.').collect();
    for (name, number) in ["@MAJOR@", "@MINOR@", "@PATCH@"].into_iter().zip(version) {
        config.after_includes = config.after_includes.map(|text| text.replace(name, number));
    }
    // Otherwise cargo downloads the dependencies of other operating systems.
    let builder = cbindgen::Builder::new().with_crate(ROOT).with_config(config).with_only_target_dependencies(true);
    let bindings = builder.generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    by_topic(&String::from_utf8(text).unwrap())
}

/// Sorts the declarations by topic. The opaque types come first: functions of several topics use them.
fn by_topic(header: &str) -> String {
    const OPENING: &str = "#ifdef __cplusplus\nextern \"C\" {\n#endif // __cplusplus\n";
    const CLOSING: &str = "#ifdef __cplusplus\n}  // extern \"C\"\n#endif  // __cplusplus\n";
    let start = header.find("/*\n").unwrap();
    let end = header.find(CLOSING).unwrap();
    let source = |file| fs::read_to_string(Path::new(ROOT).join("src").join(file).with_extension("rs")).unwrap();
    let topics = TOPICS.map(|(title, files)| (title, files.iter().map(source).collect::<String>()));
    let mut sorted = vec![String::new(); topics.len()];
    let mut handles = String::new();
    for declaration in declarations(&header[start..end].replace(OPENING, "")) {
        let (_, code) = declaration.split_once("*/\n").unwrap_or(("", &declaration));
        let code = code.trim_start_matches("VMMFD_MUST_USE\n");
        let words: Vec<&str> = code.split([' ', '*', '(', ';', '\n']).filter(|word| !word.is_empty()).collect();
        let name = match words[..] {
            ["#define", name, ..] | ["typedef", "struct" | "enum", name, ..] | ["typedef", "void", name, ..] => {
                name.trim_end_matches(')')
            }
            _ => code.split('(').next().unwrap().rsplit([' ', '*']).next().unwrap(),
        };
        let is_source = |(_, text): &(_, String)| {
            ["struct", "enum", "type", "const", "fn"].iter().any(|kind| defines(text, kind, name))
        };
        let at = topics.iter().position(is_source).unwrap_or_else(|| panic!("no source file declares {name}: {code}"));
        let is_handle = code.starts_with("typedef struct") && !code.contains('{');
        let place = if is_handle { &mut handles } else { &mut sorted[at] };
        place.push_str(&declaration);
        place.push('\n');
    }
    let rule = |title: &str| format!("/* ---- {title} ---- */\n\n");
    let mut all = format!("{}{OPENING}\n{}{handles}", &header[..start], rule("Handles"));
    for ((title, _), declarations) in topics.iter().zip(sorted) {
        all += &format!("{}{declarations}", rule(title));
    }
    all + &header[end..]
}

/// Whether a source defines a name.
fn defines(source: &str, kind: &str, name: &str) -> bool {
    let definition = format!("{kind} {name}");
    let follows = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_');
    source.match_indices(&definition).any(|(at, _)| follows(&source[at + definition.len()..]))
}

/// Splits declarations, each with its comment.
fn declarations(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut current = String::new();
    let mut comment = false;
    let mut depth = 0;
    for line in text.lines() {
        if current.is_empty() && line.is_empty() {
            continue;
        }
        current += line;
        current.push('\n');
        comment |= line.trim_start().starts_with("/*");
        if comment {
            comment = !line.trim_end().ends_with("*/");
            continue;
        }
        depth += line.matches('{').count();
        depth -= line.matches('}').count();
        if depth == 0 && (line.ends_with(';') || line.starts_with("#define")) {
            all.push(std::mem::take(&mut current));
        }
    }
    assert!(current.is_empty(), "not a declaration: {current}");
    all
}

/// The functions that the header declares.
fn functions(header: &str) -> BTreeSet<&str> {
    let words = header.lines().filter(|line| !line.starts_with([' ', '/', '*', '#']));
    words
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("vmmfd_"))
        .collect()
}

#[test]
fn committed_header_matches_source() {
    check("include/vmmfd.h", &header());
}

#[test]
fn committed_symbols_match_header() {
    let header = header();
    let functions = functions(&header);
    assert!((60..=90).contains(&functions.len()), "{} functions", functions.len());
    let list: String = functions.iter().map(|name| format!("{name}\n")).collect();
    check("abi/symbols", &list);
}

#[test]
fn every_function_is_called_in_tests() {
    let tests: String = ["every.c", "parts.h", "every_broker.c", "every_stream.c", "every_order.c"]
        .iter()
        .map(|name| fs::read_to_string(Path::new(ROOT).join("tests").join(name)).unwrap_or_default())
        .collect();
    let header = header();
    let missing: Vec<&str> =
        functions(&header).into_iter().filter(|name| !tests.contains(&format!("{name}("))).collect();
    assert!(missing.is_empty(), "capi/tests call no {missing:?}");
}
