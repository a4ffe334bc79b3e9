//! The layout of text for people: tables that fit the terminal, and words of a shell.

use std::io;

use rustix::termios::tcgetwinsize;
use vmmfd::internals::clean;

/// On narrower terminals, tables are laid out for this width.
const NARROWEST: usize = 60;

/// The width of standard output, if it is a terminal.
pub fn stdout_width() -> Option<usize> {
    let columns = usize::from(tcgetwinsize(io::stdout()).ok()?.ws_col);
    (columns > 0).then(|| columns.max(NARROWEST))
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
    pub fn new(columns: [Column<'a>; N], rows: impl IntoIterator<Item = [String; N]>) -> Self {
        let mut rows: Vec<[String; N]> = rows.into_iter().collect();
        rows.iter_mut().flatten().for_each(clean);
        Self { columns, rows }
    }

    /// The text below a heading; `None` without rows.
    pub fn section(&self, heading: &str, width: Option<usize>) -> Option<String> {
        (!self.rows.is_empty()).then(|| format!("{heading}:\n{}", self.render(width)))
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
        let columns = [Column::right("SIZE"), Column::left("AGE").optional(), Column::left("NAME")];
        let rows = [["1 KiB", "5s", "a"], ["10 KiB", "100m", "long/name\u{1b}[1m"]];
        Table::new(columns, rows.map(|row| row.map(str::to_owned)))
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
}
