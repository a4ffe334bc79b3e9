//! The file with options of `serve`, in the form of those in /etc/default: one assignment of a shell.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::libc;

/// What it assigns. Another name is an error: an option with a wrong name would have no effect otherwise.
const VARIABLE: &str = "VMMFD_OPTIONS";

/// The longest file, in bytes.
const MOST: u64 = 64 << 10;

/// The options in a file, word by word. A file that does not exist has none.
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

/// The text of a regular file. Another kind may have no end, or block for ever.
fn text(path: &Path) -> io::Result<String> {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    file.take(MOST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST { Err(io::Error::other(format!("it has more than {MOST} bytes"))) } else { Ok(text) }
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
            ("--allow-uid 1000", 1, "no assignment"),
            ("VMMFD_OPTIONS=-v\nVMMFD_OPTIONS=-v", 2, "second time"),
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
    fn what_is_no_short_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, long) = (folder.path().join("fifo"), folder.path().join("long"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        fs::write(&long, "#".repeat(MOST as usize + 1)).unwrap();
        for (path, why) in [
            (fifo.as_path(), "no regular file"),
            (Path::new("/dev/zero"), "no regular file"),
            (folder.path(), "no regular file"),
            (&long, "more than 65536 bytes"),
        ] {
            let problem = read(path).unwrap_err();
            assert!(problem.contains(why), "{problem}");
        }
        assert_eq!(read(&folder.path().join("absent")).unwrap(), [""; 0]);
    }
}
