//! The layout of text for people: tables, lines that fit the terminal, and ASCII if the locale has no other characters.

use std::{env, io, io::IsTerminal, os::fd::AsFd};

use vmmfd::internals::clean;

/// On narrower terminals, text is laid out for this width.
const NARROWEST: usize = 60;

/// The narrowest text beside a label. In less room, continued lines begin below the label.
const NARROWEST_TEXT: usize = 24;

/// ASCII characters for the others in our own texts.
const ASCII: [(&str, char); 7] =
    [("✓", '+'), ("✗", 'x'), ("–", '-'), ("·", '.'), ("…", '~'), ("█▉▊▋▌", '#'), ("▍▎▏", ':')];

/// The text as a stream shows it: its lines fit the terminal, if it is one. JSON and scripts must not be changed like this.
pub(super) fn shown(text: &str, stream: &(impl AsFd + IsTerminal)) -> String {
    wrapped(&in_locale(text, is_unicode()), width(stream))
}

/// The width of a terminal; `None` for any other stream.
fn width(stream: &(impl AsFd + IsTerminal)) -> Option<usize> {
    let size = stream.is_terminal().then(|| rustix::termios::tcgetwinsize(stream).ok()).flatten();
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0).map(|columns| columns.max(NARROWEST))
}

/// The width of standard output, if it is a terminal.
pub fn stdout_width() -> Option<usize> {
    width(&io::stdout())
}

/// Whether the locale of the environment has all characters.
pub(super) fn is_unicode() -> bool {
    has_unicode(|name| env::var(name).ok())
}

/// See locale(7).
fn has_unicode(variable: impl Fn(&str) -> Option<String>) -> bool {
    let named = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(variable).find(|locale| !locale.is_empty());
    let charset = named.unwrap_or_default().to_ascii_lowercase();
    charset.contains("utf-8") || charset.contains("utf8")
}

fn in_locale(text: &str, unicode: bool) -> String {
    if unicode || text.is_ascii() {
        return text.to_owned();
    }
    let ascii = |c: char| ASCII.iter().find(|(from, _)| from.contains(c)).map_or(c, |(_, to)| *to);
    text.chars().map(ascii).collect()
}

/// Breaks longer lines between words. The continued lines are indented like the text after the line's label.
fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    text.split_inclusive('\n').map(|line| wrapped_line(line, width)).collect()
}

fn wrapped_line(line: &str, width: usize) -> String {
    if visible(line.trim_end()) <= width {
        return line.to_owned();
    }
    let end = if line.ends_with('\n') { "\n" } else { "" };
    let indent = indent(line, width);
    let mut text = String::new();
    let mut used = 0;
    let mut blanks = 0;
    for (at, word) in line.trim_end().split(' ').enumerate() {
        blanks += usize::from(at > 0);
        if word.is_empty() {
            continue;
        }
        let length = visible(word);
        let (broken, gap) =
            if used > indent && used + blanks + length > width && word != "\\" { ("\n", indent) } else { ("", blanks) };
        text += &format!("{broken}{:gap$}{word}", "");
        used = if broken.is_empty() { used + gap + length } else { indent + length };
        blanks = 0;
    }
    text + end
}

/// A text as one word of a shell.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+:@%,=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A command to paste: a backslash continues each broken line.
pub(super) fn command(words: impl Iterator<Item = String>, width: Option<usize>) -> String {
    let mut text = String::new();
    let mut used = 0;
    for word in words {
        let length = visible(&word);
        let fits = width.is_none_or(|width| used + 1 + length + " \\".len() <= width);
        let (gap, before) = if text.is_empty() {
            ("", 0)
        } else if fits {
            (" ", used + 1)
        } else {
            (" \\\n", 0)
        };
        text += &format!("{gap}{word}");
        used = before + length;
    }
    text + "\n"
}

/// Where continued lines begin: at the text after the first column gap, if there is room, else two columns after the line's own start.
fn indent(line: &str, width: usize) -> usize {
    let lead = line.len() - line.trim_start_matches(' ').len();
    let text = line[lead..].find("  ").map(|gap| {
        let (label, rest) = line.split_at(lead + gap);
        visible(label) + rest.len() - rest.trim_start_matches(' ').len()
    });
    text.filter(|text| text + NARROWEST_TEXT <= width).unwrap_or(lead + 2)
}

/// The number of visible characters, without colour codes.
fn visible(text: &str) -> usize {
    let codes = text.split('\x1b').skip(1).filter_map(|part| part.split_once('m'));
    text.chars().count() - codes.map(|(code, _)| code.len() + 2).sum::<usize>()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    Right,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column<'a> {
    title: &'a str,
    align: Align,
    /// Whether a narrow terminal may omit it; the last optional column is omitted first.
    optional: bool,
}

impl<'a> Column<'a> {
    pub const fn left(title: &'a str) -> Self {
        Self { title, align: Align::Left, optional: false }
    }

    pub const fn right(title: &'a str) -> Self {
        Self { title, align: Align::Right, optional: false }
    }

    pub const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// A table with aligned columns.
#[derive(Debug)]
pub struct Table<'a, const N: usize> {
    columns: [Column<'a>; N],
    rows: Vec<[String; N]>,
}

impl<'a, const N: usize> Table<'a, N> {
    pub fn new(columns: [Column<'a>; N]) -> Self {
        Self { columns, rows: Vec::new() }
    }

    pub fn row(&mut self, mut cells: [String; N]) {
        cells.iter_mut().for_each(clean);
        self.rows.push(cells);
    }

    /// The text. Omits optional columns until it fits `width`.
    pub fn render(&self, width: Option<usize>) -> String {
        let length = |text: &str| text.chars().count();
        let widths: [usize; N] = std::array::from_fn(|at| {
            let cells = self.rows.iter().map(|row| length(&row[at]));
            cells.chain([length(self.columns[at].title)]).max().unwrap_or(0)
        });
        let mut shown: Vec<usize> = (0..N).collect();
        let total = |shown: &[usize]| shown.iter().map(|at| widths[*at] + 2).sum::<usize>().saturating_sub(2);
        while width.is_some_and(|width| total(&shown) > width) {
            let Some(last) = shown.iter().rposition(|at| self.columns[*at].optional) else { break };
            shown.remove(last);
        }
        let line = |cell: &dyn Fn(usize) -> String| {
            let mut line = String::new();
            for at in &shown {
                let text = cell(*at);
                let width = widths[*at];
                line += &match self.columns[*at].align {
                    Align::Left => format!("{text:<width$}  "),
                    Align::Right => format!("{text:>width$}  "),
                };
            }
            format!("{}\n", line.trim_end())
        };
        let header = line(&|at| self.columns[at].title.to_owned());
        self.rows.iter().fold(header, |text, row| text + &line(&|at| row[at].clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table<'static, 3> {
        let mut table = Table::new([Column::right("SIZE"), Column::left("AGE").optional(), Column::left("NAME")]);
        table.row(["1 KiB".to_owned(), "5s".to_owned(), "a".to_owned()]);
        table.row(["10 KiB".to_owned(), "100m".to_owned(), "long/name\u{1b}[1m".to_owned()]);
        table
    }

    #[test]
    fn columns_are_aligned_and_clean() {
        let want = "  SIZE  AGE   NAME\n 1 KiB  5s    a\n10 KiB  100m  long/name [1m\n";
        assert_eq!(table().render(None), want);
        assert_eq!(table().render(Some(27)), want);
    }

    #[test]
    fn a_narrow_terminal_has_fewer_columns() {
        let want = "  SIZE  NAME\n 1 KiB  a\n10 KiB  long/name [1m\n";
        assert_eq!(table().render(Some(26)), want);
        // Other columns are never omitted.
        assert_eq!(table().render(Some(1)), want);
    }

    #[test]
    fn long_lines_continue_beside_their_label() {
        let long = "word ".repeat(16);
        let text = format!("put        {long}\nshort   line\n  hint: {long}");
        let want = "put        word word word word word word word word word word\n           word word word word word word\n\
            short   line\n\
            \x20 hint: word word word word word word word word word word\n    word word word word word word";
        assert_eq!(wrapped(&text, Some(60)), want);
        assert_eq!(wrapped(&text, None), text);
    }

    #[test]
    fn continued_text_has_room() {
        let far = format!("{:36}  {}\n", "label", "word ".repeat(8));
        assert_eq!(wrapped(&far, Some(60)), format!("{:36}  word word word word\n  word word word word\n", "label"));
        let near = format!("{:34}  {}\n", "label", "word ".repeat(8));
        assert!(wrapped(&near, Some(60)).ends_with(&format!("word\n{:36}word word word\n", "")));
    }

    #[test]
    fn long_words_stay_whole() {
        let word = "x".repeat(70);
        assert_eq!(wrapped(&format!("a  b {word} c\n"), Some(60)), format!("a  b\n   {word}\n   c\n"));
        assert_eq!(wrapped(&format!("a  {word}\n"), Some(60)), format!("a  {word}\n"));
    }

    #[test]
    fn broken_commands_can_be_pasted() {
        let words =
            || ["vmmfd", "rm", "--socket", "/a/long/path/to/a/socket", "--confirm CODE"].map(str::to_owned).into_iter();
        assert_eq!(command(words(), None), "vmmfd rm --socket /a/long/path/to/a/socket --confirm CODE\n");
        let broken = command(words(), Some(30));
        assert_eq!(broken, "vmmfd rm --socket \\\n/a/long/path/to/a/socket \\\n--confirm CODE\n");
        let long = format!("{} \\\n", "x".repeat(60));
        assert_eq!(wrapped(&long, Some(60)), long);
    }

    #[test]
    fn colour_codes_have_no_width() {
        let text = format!("\x1b[32m{}\x1b[0m\n", "word ".repeat(12).trim_end());
        assert_eq!(wrapped(&text, Some(60)), text);
        assert_eq!(wrapped(&format!("\x1b[1mab\x1b[0m  {text}"), Some(62)).matches('\n').count(), 2);
    }

    #[test]
    fn first_set_variable_is_the_locale() {
        let locale = |set: &[(&str, &str)]| {
            has_unicode(|name| set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned()))
        };
        assert!(locale(&[("LANG", "C.UTF-8")]) && locale(&[("LC_ALL", ""), ("LC_CTYPE", "de_DE.utf8")]));
        assert!(!locale(&[]) && !locale(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")]));
        assert!(!locale(&[("LC_CTYPE", "POSIX"), ("LANG", "C.UTF-8")]));
    }

    #[test]
    fn other_locales_get_ascii() {
        let text = "✓ – · ✗ … ██▍ naïve";
        assert_eq!(in_locale(text, true), text);
        // Names of files keep their bytes.
        assert_eq!(in_locale(text, false), "+ - . x ~ ##: naïve");
    }
}
