//! Every link has a target: a file, or a heading or an anchor of a page.

use std::path::Component;

use super::{Page, blocks, root};
use crate::support::prelude::*;

/// The text outside of code blocks and backticks.
fn prose(text: &str) -> String {
    let (inside, _) = blocks::read(text);
    let lines = text.lines().zip(inside).filter(|(_, inside)| !inside).map(|(line, _)| line);
    let mut prose = String::new();
    for line in lines {
        for (at, part) in line.split('`').enumerate() {
            if at % 2 == 0 {
                prose.push_str(part);
            } else {
                // Keeps a link's text from being empty.
                prose.push('x');
            }
        }
        prose.push('\n');
    }
    prose
}

/// The targets of a page's links.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text);
    let inline = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let tags = ["href=\"", "src=\"", "srcset=\""];
    let in_tags = tags.iter().flat_map(|tag| prose.split(tag).skip(1).filter_map(|rest| rest.split('"').next()));
    inline.chain(in_tags).map(|target| target.trim().to_owned()).collect()
}

/// The anchors of a page: its headings in GitHub's spelling, and explicit ids.
fn anchors(text: &str) -> BTreeSet<String> {
    let (inside, _) = blocks::read(text);
    let mut anchors = BTreeSet::new();
    let mut seen = BTreeMap::<String, u32>::new();
    for (line, inside) in text.lines().zip(inside) {
        if inside {
            continue;
        }
        let level = line.len() - line.trim_start_matches('#').len();
        if (1..=6).contains(&level) && line[level..].starts_with(' ') {
            let slug: String = line[level..]
                .trim()
                .to_lowercase()
                .chars()
                .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect();
            let times = seen.entry(slug.clone()).or_default();
            anchors.insert(if *times == 0 { slug } else { format!("{slug}-{times}") });
            *times += 1;
        }
        anchors.extend(line.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned));
    }
    anchors
}

/// Resolves `.` and `..` in a path; `None` if it leaves the repository.
fn resolved(from: &str, to: &str) -> Option<PathBuf> {
    let mut path = PathBuf::from(from).parent()?.to_owned();
    for part in Path::new(to).components() {
        match part {
            Component::ParentDir => path.pop().then_some(())?,
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(path)
}

/// Checks one link of a page.
fn check(page: &str, text: &str, target: &str) -> Result<(), String> {
    if target.starts_with("https://") {
        return Ok(());
    }
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let path = match file {
        "" => PathBuf::from(page),
        file => resolved(page, file).ok_or_else(|| format!("{target} leads out of the sources"))?,
    };
    if !root().join(&path).exists() && page != "test" {
        return Err(format!("{target}: there is no {}", path.display()));
    }
    let Some(anchor) = anchor else { return Ok(()) };
    let text =
        if file.is_empty() { text.to_owned() } else { fs::read_to_string(root().join(&path)).unwrap_or_default() };
    anchors(&text).contains(anchor).then_some(()).ok_or_else(|| format!("{target}: there is no such heading"))
}

#[test]
fn every_link_leads_somewhere() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in Page::all() {
        for target in targets(&page.text) {
            seen += 1;
            if let Err(problem) = check(&page.path, &page.text, &target) {
                wrong.push(format!("{}: {problem}", page.path));
            }
        }
    }
    assert!(seen > 60, "{seen} links");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_index_names_every_page() {
    let index = Page::read("docs/index.md");
    let linked: BTreeSet<PathBuf> = targets(&index.text)
        .iter()
        .filter_map(|target| resolved(&index.path, target.split('#').next().unwrap()))
        .collect();
    for page in Page::all().iter().filter(|page| page.path.starts_with("docs/") && page.path != index.path) {
        assert!(linked.contains(Path::new(&page.path)), "docs/index.md does not name {}", page.path);
    }
}
