//! The file with options of `serve`, in the form of those in /etc/default: one assignment of a shell.

use std::{fs, io, path::Path};

/// What it assigns. Another name is an error: an option with a wrong name would have no effect otherwise.
const VARIABLE: &str = "VMMFD_OPTIONS";

/// The options in a file, word by word. A file that does not exist has none.
///
/// # Errors
/// One sentence that names the file and its line.
pub(in super::super) fn read(path: &Path) -> Result<Vec<String>, String> {
    match fs::read_to_string(path) {
        Ok(text) => words(&text).map_err(|(line, problem)| format!("{}, line {line}: {problem}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("{} can't be read: {error}", path.display())),
    }
}

/// The options in a text, or the number of a wrong line and the problem.
fn words(text: &str) -> Result<Vec<String>, (usize, String)> {
    let mut found: Option<Vec<String>> = None;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        let wrong = |problem: String| Err((at + 1, problem));
        let Some((name, value)) = line.split_once('=') else {
            return wrong(format!("`{line}` is no assignment: write {VARIABLE}=\"--allow-uid 1000\""));
        };
        if name != VARIABLE {
            return wrong(format!("`{name}` is not read from this file: write {VARIABLE}="));
        }
        if found.is_some() {
            return wrong(format!("{VARIABLE} is assigned a second time: write all options in one line"));
        }
        let quoted = ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
        let value = quoted.unwrap_or(value);
        if let Some(special) = value.chars().find(|c| matches!(c, '"' | '\'' | '\\' | '$' | '`' | '#')) {
            return wrong(format!("{special} is not allowed in the options: they are words with spaces in between"));
        }
        found = Some(value.split_whitespace().map(str::to_owned).collect());
    }
    Ok(found.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_words_of_one_assignment() {
        let good = |text: &str| words(text).unwrap();
        assert_eq!(good(""), [""; 0]);
        assert_eq!(good("# VMMFD_OPTIONS=x\n\n; y\n"), [""; 0]);
        let two = ["--allow-uid", "1000"];
        for text in [
            "VMMFD_OPTIONS=\"--allow-uid 1000\"\n",
            "VMMFD_OPTIONS='--allow-uid  1000'",
            "VMMFD_OPTIONS=--allow-uid 1000",
        ] {
            assert_eq!(good(text), two, "{text}");
        }
        assert_eq!(good("VMMFD_OPTIONS=\n"), [""; 0]);
    }

    #[test]
    fn typos_are_errors_with_their_line() {
        for (text, line, names) in [
            ("\nVMMFD_OPTION=\"-v\"\n", 2, "`VMMFD_OPTION`"),
            ("vmmfd_options=-v", 1, "`vmmfd_options`"),
            ("export VMMFD_OPTIONS=-v", 1, "`export VMMFD_OPTIONS`"),
            ("--allow-uid 1000", 1, "no assignment"),
            ("VMMFD_OPTIONS=-v\nVMMFD_OPTIONS=-v", 2, "second time"),
            ("VMMFD_OPTIONS=\"-v", 1, "\" is not allowed"),
            ("VMMFD_OPTIONS=\"-v\" # more", 1, "\" is not allowed"),
            ("VMMFD_OPTIONS=-v \\", 1, "\\ is not allowed"),
        ] {
            let (at, problem) = words(text).unwrap_err();
            assert!(at == line && problem.contains(names), "{text}: line {at}: {problem}");
        }
    }
}
