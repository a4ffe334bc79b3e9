//! The options file of `serve`, in the format of /etc/default: one shell assignment.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::libc;

/// The only accepted variable. Another name is an error, because the file would have no effect.
const VARIABLE: &str = "VMMFD_OPTIONS";

/// The maximum size of the file in bytes.
const MOST: u64 = 64 << 10;

/// The options in a file, as words. An absent file has none.
///
/// # Errors
/// One sentence that names the file and its line.
pub(in super::super) fn read(path: &Path) -> Result<Vec<String>, String> {
    match text(path) {
        Ok(text) => words(&text).map_err(|(line, problem)| format!("{}, line {line}: {problem}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("{} can't be read: {error}", path.display())),
    }
}

/// The text of a regular file. Other files may be endless, or block forever.
fn text(path: &Path) -> io::Result<String> {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    file.take(MOST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST { Err(io::Error::other(format!("it has more than {MOST} bytes"))) } else { Ok(text) }
}

/// The options in a text, or the number of a bad line and its problem.
fn words(text: &str) -> Result<Vec<String>, (usize, String)> {
    let mut found: Option<Vec<String>> = None;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        let wrong = |problem: String| Err((at + 1, problem));
        let Some((name, value)) = line.split_once('=') else {
            return wrong(format!("`{line}` is not an assignment: write {VARIABLE}=\"--allow-uid 1000\""));
        };
        if name != VARIABLE {
            return wrong(format!("`{name}` is not read from this file: write {VARIABLE}="));
        }
        if found.is_some() {
            return wrong(format!("{VARIABLE} is assigned twice: write all options in one line"));
        }
        let quoted = ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
        let value = quoted.unwrap_or(value);
        if let Some(special) = value.chars().find(|c| matches!(c, '"' | '\'' | '\\' | '$' | '`' | '#')) {
            return wrong(format!("{special} is not allowed in the options: separate plain words by spaces"));
        }
        let options: Vec<String> = value.split_whitespace().map(str::to_owned).collect();
        if let Some(no_start) =
            options.iter().find(|option| ["--check", "-h", "--help", "-V", "--version"].contains(&option.as_str()))
        {
            return wrong(format!("{no_start} is not allowed in the options: no broker would start"));
        }
        found = Some(options);
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
            ("--allow-uid 1000", 1, "not an assignment"),
            ("VMMFD_OPTIONS=-v\nVMMFD_OPTIONS=-v", 2, "assigned twice"),
            ("VMMFD_OPTIONS=\"-v", 1, "\" is not allowed"),
            ("VMMFD_OPTIONS=\"-v\" # more", 1, "\" is not allowed"),
            ("VMMFD_OPTIONS=-v \\", 1, "\\ is not allowed"),
            ("VMMFD_OPTIONS=\"-v --check\"", 1, "no broker would start"),
        ] {
            let (at, problem) = words(text).unwrap_err();
            assert!(at == line && problem.contains(names), "{text}: line {at}: {problem}");
        }
    }

    #[test]
    fn other_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let long = folder.path().join("long");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        fs::write(&long, "#".repeat(MOST as usize + 1)).unwrap();
        for (path, why) in [
            (fifo.as_path(), "not a regular file"),
            (Path::new("/dev/zero"), "not a regular file"),
            (folder.path(), "not a regular file"),
            (&long, "more than 65536 bytes"),
        ] {
            let problem = read(path).unwrap_err();
            assert!(problem.contains(why), "{problem}");
        }
        assert_eq!(read(&folder.path().join("absent")).unwrap(), [""; 0]);
    }
}
