//! Text of the broker's commands: aligned tables that fit the terminal, lines of one field, ages.

use std::{
    io::{self, IsTerminal},
    time::{Duration, SystemTime},
};

use vmmfd::internals::clean;

/// The latest time that RFC 3339 can write, in milliseconds since 1970.
const LAST: u64 = 253_402_300_799_999;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    title: &'static str,
    align: Align,
    /// Whether a narrow terminal may omit it; the last optional column is omitted first.
    optional: bool,
}

impl Column {
    pub(super) const fn left(title: &'static str) -> Self {
        Self { title, align: Align::Left, optional: false }
    }

    pub(super) const fn right(title: &'static str) -> Self {
        Self { title, align: Align::Right, optional: false }
    }

    pub(super) const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

#[derive(Debug)]
pub(super) struct Table<const N: usize> {
    columns: [Column; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    pub(super) fn new(columns: [Column; N]) -> Self {
        Self { columns, rows: Vec::new() }
    }

    pub(super) fn row(&mut self, mut cells: [String; N]) {
        cells.iter_mut().for_each(clean);
        self.rows.push(cells);
    }

    /// The text. Omits optional columns until it fits `width`.
    pub(super) fn render(&self, width: Option<usize>) -> String {
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
                let (text, width) = (cell(*at), widths[*at]);
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

/// The width of standard output, if it is a terminal.
pub(super) fn width() -> Option<usize> {
    let stdout = io::stdout();
    let size = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten();
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// A line with a name and a value.
pub(super) fn field(name: &str, value: impl Into<String>) -> String {
    let mut line = format!("{name:<9}  {}", value.into());
    clean(&mut line);
    line + "\n"
}

/// A time in milliseconds since 1970, as UTC (RFC 3339).
pub(super) fn time(ms: u64) -> String {
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + Duration::from_millis(ms.min(LAST))).to_string()
}

/// The age of a time in milliseconds since 1970, in its largest unit: `5s`, `3m`, `2h`, `4d`.
pub(super) fn age(ms: u64) -> String {
    let since = SystemTime::UNIX_EPOCH + Duration::from_millis(ms.min(LAST));
    in_short(SystemTime::now().duration_since(since).unwrap_or_default())
}

fn in_short(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..=99 => format!("{seconds}s"),
        seconds @ 100..=5_999 => format!("{}m", seconds / 60),
        seconds @ 6_000..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table<3> {
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
    fn ages_have_one_unit() {
        for (seconds, text) in [(0, "0s"), (99, "99s"), (100, "1m"), (6_000, "1h"), (172_800, "2d")] {
            assert_eq!(in_short(Duration::from_secs(seconds)), text);
        }
        assert_eq!(time(1_000), "1970-01-01T00:00:01.000Z");
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.999Z");
        assert_eq!(age(u64::MAX), "0s");
    }
}
