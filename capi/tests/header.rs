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

fn header() -> String {
    let config = cbindgen::Config::from_file(Path::new(ROOT).join("cbindgen.toml")).unwrap();
    // Otherwise cargo downloads the dependencies of other operating systems.
    let builder = cbindgen::Builder::new().with_crate(ROOT).with_config(config).with_only_target_dependencies(true);
    let bindings = builder.generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).unwrap()
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
    assert!((30..=45).contains(&functions.len()), "{} functions", functions.len());
    let list: String = functions.iter().map(|name| format!("{name}\n")).collect();
    check("abi/symbols", &list);
}

#[test]
fn every_function_is_called_in_tests() {
    let tests: String = ["every.c", "parts.h", "every_broker.c"]
        .iter()
        .map(|name| fs::read_to_string(Path::new(ROOT).join("tests").join(name)).unwrap_or_default())
        .collect();
    let header = header();
    let missing: Vec<&str> =
        functions(&header).into_iter().filter(|name| !tests.contains(&format!("{name}("))).collect();
    assert!(missing.is_empty(), "capi/tests call no {missing:?}");
}
