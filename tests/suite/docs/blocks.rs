//! Every code block is compiled, run or compared; an unchecked block is an error.
//!
//! The language of a block, or the mark in the line above it, selects the check:
//!
//! | Block | Check |
//! |---|---|
//! | `rust` | a doctest: the page is included by `src/lib.rs` |
//! | `sh`, `<!-- file: PATH -->`, `<!-- output -->` | `python/tests/test_pages.py` runs the page in order, in one folder |
//! | `sh` with `<!-- needs: REASON -->` | each line: the options of our commands, make's targets, the files named |
//! | `toml` | the lines of a user's dependencies, which `make check` builds |
//! | `<!-- terminal: NAME -->`, `<!-- terminals -->`, `<!-- json: NAME -->`, `<!-- doctor -->`, `<!-- journal -->` | a test in this folder compares it with the command's output |
//! | `<!-- exit codes -->` | generated |
//! | `<!-- python: NAME -->` | `scripts/protocol/check.py` runs it |
//! | `<!-- excerpt: FILE -->` | the file contains it, word for word apart from its indentation |
//! | `<!-- checked by: FILE::TEST -->` | that test, in Rust or Python |

use super::{Page, root, shell, source};

/// A fenced block.
pub(super) struct Block<'a> {
    pub(super) line: usize,
    pub(super) language: &'a str,
    /// The text of the comment above the block.
    pub(super) mark: Option<&'a str>,
    pub(super) lines: Vec<&'a str>,
}

/// Marks each line of a page that is in a fenced block, and returns the blocks.
pub(super) fn read(text: &str) -> (Vec<bool>, Vec<Block<'_>>) {
    let (mut inside, mut blocks) = (Vec::new(), Vec::<Block<'_>>::new());
    let (mut open, mut before) = (None::<&str>, "");
    for (at, line) in text.lines().enumerate() {
        let ticks = &line.trim_start()[..line.trim_start().len() - line.trim_start().trim_start_matches('`').len()];
        let info = line.trim_start().trim_start_matches('`').trim();
        match open {
            Some(fence) if ticks.len() >= fence.len() && info.is_empty() => open = None,
            Some(_) => blocks.last_mut().unwrap().lines.push(line),
            None if ticks.len() >= 3 => {
                let mark = before.trim().strip_prefix("<!--").and_then(|mark| mark.strip_suffix("-->")).map(str::trim);
                blocks.push(Block { line: at + 1, language: info, mark, lines: Vec::new() });
                inside.push(true);
                open = Some(ticks);
                before = line;
                continue;
            }
            None => {
                inside.push(false);
                before = line;
                continue;
            }
        }
        inside.push(true);
        before = line;
    }
    assert!(open.is_none(), "a block is not closed");
    (inside, blocks)
}

/// Checks a block, or returns the reason for the failure.
fn check(page: &str, block: &Block<'_>) -> Result<(), String> {
    let kind = block.mark.map(|mark| mark.split_once(": ").unwrap_or((mark, "")));
    // At a prompt, zsh passes a comment as arguments. The page for contributors lists targets to choose from.
    let is_pasted = block.language == "sh" && page != "docs/CONTRIBUTING.md";
    if let Some(line) = block.lines.iter().find(|line| is_pasted && format!(" {line}").contains(" #")) {
        return Err(format!("`{line}` has a comment"));
    }
    // rustdoc hides such a line, and a reader of the page sees it.
    let is_hidden = |line: &&&str| **line == "#" || line.starts_with("# ");
    if let Some(line) = block.lines.iter().find(|line| block.language.starts_with("rust") && is_hidden(line)) {
        return Err(format!("`{line}` is hidden only in rustdoc"));
    }
    match (block.language, kind) {
        (_, Some(("excerpt", file))) => {
            // In a module, or in a function.
            let indented = |indent: &str| -> String {
                let line = |line: &&str| if line.is_empty() { "\n".to_owned() } else { format!("{indent}{line}\n") };
                block.lines.iter().map(line).collect()
            };
            let whole = std::fs::read_to_string(root().join(file)).map_err(|error| format!("{file}: {error}"))?;
            let contains = |indent| whole.contains(&indented(indent));
            ["", "    ", "        "]
                .into_iter()
                .any(contains)
                .then_some(())
                .ok_or_else(|| format!("it is not in {file}"))
        }
        (_, Some(("checked by", test))) => exists(test),
        (_, Some(("file", _))) => Ok(()),
        (language, _) if language.split(',').next() == Some("rust") => {
            if language.contains("ignore") {
                return Err("its code is not compiled".to_owned());
            }
            let including = if page == "docs/protocol.md" { "src/wire/mod.rs" } else { "src/lib.rs" };
            let included = source(including).contains(&format!("{page}\")"));
            included.then_some(()).ok_or_else(|| format!("{including} does not include the page, so it is no doctest"))
        }
        ("sh", Some(("needs", reason))) if !reason.is_empty() => {
            block.lines.iter().try_for_each(|line| shell::check(line))
        }
        ("sh", None) | ("text", Some(("output", ""))) => Ok(()),
        ("toml", None) => block.lines.iter().try_for_each(|line| dependency(line)),
        ("console", Some(("terminal", "producer" | "consumer" | "producer -v" | "consumer -v")))
        | ("json", Some(("json", "producer" | "consumer")))
        | ("text", Some(("exit codes" | "doctor" | "journal" | "terminals", ""))) => Ok(()),
        ("python", Some(("python", name))) => {
            let run = source("scripts/protocol/check.py").contains(&format!("<!-- python: {name} -->"));
            run.then_some(()).ok_or_else(|| "scripts/protocol/check.py does not run it".to_owned())
        }
        (language, mark) => Err(format!("nothing checks a block of `{language}` with the mark {mark:?}")),
    }
}

/// Whether the test `FILE::TEST` or `suite::FILE::TEST` exists.
pub(super) fn exists(test: &str) -> Result<(), String> {
    let (file, name) = test.rsplit_once("::").ok_or_else(|| format!("`{test}` names no test"))?;
    let files = match file.strip_prefix("suite::") {
        Some(module) => {
            let module = module.replace("::", "/");
            vec![format!("tests/suite/{module}.rs"), format!("tests/suite/{module}/mod.rs")]
        }
        None => vec![file.to_owned()],
    };
    let text = files.iter().find_map(|file| std::fs::read_to_string(root().join(file)).ok());
    let text = text.ok_or_else(|| format!("there is no {}", files[0]))?;
    let heads = [format!("fn {name}("), format!("def {name}(")];
    let found = heads.iter().any(|head| text.contains(head));
    found.then_some(()).ok_or_else(|| format!("{} has no test {name}", files[0]))
}

/// Checks a dependency line: `make check` builds this dependency, and the manifest has it.
fn dependency(line: &str) -> Result<(), String> {
    if line == "[dependencies]" {
        return Ok(());
    }
    let manifest = source("Cargo.toml");
    let user = source("tests/users/cuda-13.0/Cargo.toml");
    let (name, value) = line.split_once(" = ").ok_or_else(|| format!("`{line}` is no dependency"))?;
    match name {
        "cudarc" => {
            user.lines().any(|built| built == line).then_some(()).ok_or_else(|| "`make check` builds another".into())
        }
        "vmmfd" => {
            let version = manifest.lines().find_map(|line| line.strip_prefix("version = ")).unwrap().trim_matches('"');
            let (major_minor, _) = version.rsplit_once('.').unwrap();
            let good = value.contains(&format!("\"{major_minor}\""));
            good.then_some(()).ok_or_else(|| format!("the version is {version}"))
        }
        _ => Err(format!("no check knows `{name}`")),
    }
}

#[test]
fn every_block_is_checked() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for page in Page::all() {
        for block in read(&page.text).1 {
            seen += 1;
            if let Err(problem) = check(&page.path, &block) {
                wrong.push(format!("{}:{}: {problem}", page.path, block.line));
            }
        }
    }
    assert!(seen > 20, "{seen} blocks");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
