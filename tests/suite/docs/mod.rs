//! The README and the pages of `docs/` match the code.
//!
//! `UPDATE_DOCS=1` rewrites the generated parts instead of comparing them: see `docs/CONTRIBUTING.md`.

mod blocks;
mod generated;
mod links;
mod named;
mod output;
mod shell;

use std::sync::PoisonError;

use crate::support::prelude::*;

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

#[track_caller]
fn source(path: &str) -> String {
    let full = root().join(path);
    fs::read_to_string(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()))
}

/// A page, with its path in the repository.
struct Page {
    path: String,
    text: String,
}

impl Page {
    #[track_caller]
    fn read(path: &str) -> Self {
        Self { path: path.to_owned(), text: source(path) }
    }

    fn all() -> Vec<Self> {
        let mut paths = Vec::new();
        find(root(), &mut paths);
        paths.sort();
        assert!(paths.len() > 10, "{paths:?}");
        paths.into_iter().map(|path| Self::read(path.strip_prefix(root()).unwrap().to_str().unwrap())).collect()
    }

    /// The lines of the code block after a mark.
    #[track_caller]
    fn block(&self, mark: &str) -> Vec<&str> {
        let (_, after) = self
            .text
            .split_once(&format!("<!-- {mark} -->\n```"))
            .unwrap_or_else(|| panic!("{}: no {mark}", self.path));
        let (_, body) = after.split_once('\n').unwrap();
        let (body, _) = body.split_once("```").unwrap();
        body.lines().collect()
    }

    /// Compares the text between a mark and its end mark with `want`, or replaces it under `UPDATE_DOCS`.
    #[track_caller]
    fn has_generated(path: &str, mark: &str, want: &str) {
        // Two tests may update parts of one page.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let text = source(path);
        let (begin, end) = (format!("<!-- {mark} -->\n"), format!("<!-- end of {mark} -->"));
        let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{path}: no {begin}"));
        let (found, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{path}: no {end}"));
        if env::var_os("UPDATE_DOCS").is_some() {
            fs::write(root().join(path), format!("{before}{begin}{want}{end}{after}")).unwrap();
            return;
        }
        let mut lines = found.lines().zip(want.lines());
        let differs = lines.find(|(found, want)| found != want);
        let ends = ("another number of lines", "");
        assert!(
            found == want,
            "{path} is out of date after `{mark}`:\n  it has   {}\n  and not  {}\n\
             UPDATE_DOCS=1 cargo test --workspace --test suite -- docs",
            differs.unwrap_or(ends).0,
            differs.unwrap_or(ends).1
        );
    }
}

/// The pages below a folder, without build output and hidden folders.
fn find(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let left_out = name == "target" || name.starts_with("dist") || name.starts_with('.');
        if path.is_dir() && !path.is_symlink() && !left_out {
            find(&path, into);
        } else if name.ends_with(".md") {
            into.push(path);
        }
    }
}
