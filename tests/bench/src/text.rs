//! A report as text: tables, with a bar for each median.

use std::fmt::Write;

use vmmfd::driver::Backend;

use super::{
    plan::Bench,
    report::{BenchReport, Figure, Series},
    stats::TOO_NOISY,
};
use vmmfd_cli::{
    cli::{Column, Table, stdout_width},
    units::{about, device},
};

/// The mark of a median that is too noisy.
const NOISY: char = '~';

/// The length of the longest bar, in cells.
const BAR: usize = 12;

/// The last part of a report, below its tables: figures, noise, and omitted measurements.
pub fn end(report: &BenchReport) -> String {
    let mut text = if report.series.is_empty() { head(report) } else { String::new() };
    figures(&mut text, &report.figures);
    text + &foot(report)
}

/// The first part of a report: the machine and the number of samples.
pub(super) fn head(report: &BenchReport) -> String {
    let machine = &report.machine;
    let driver = match (report.backend, &machine.module) {
        (Backend::Host, _) => "no GPU is measured".to_owned(),
        (Backend::Cuda, module) => {
            let module = module.as_ref().map_or(String::new(), |module| format!("driver {module}, "));
            format!("{module}CUDA {}.{}", machine.cuda / 1000, machine.cuda % 1000 / 10)
        }
    };
    let device = match machine.device.as_str() {
        "" => String::new(),
        name => format!("{}, ", device(name, &machine.uuid, false)),
    };
    format!(
        "{} bench, {}, backend {}\n{device}{driver}, Linux {}, {} CPUs\n{} samples of each (column n; fewer of slow ones), after {} that do not count\n",
        report.tool, report.made, report.backend, machine.kernel, machine.cpus, report.count, report.warm_up
    )
}

/// A table of series that were measured in turns.
pub(super) fn table(bench: Bench, size: u64, block: &[Series]) -> String {
    // One unit for the whole table makes its rows comparable at a glance.
    let shortest = block.iter().map(|series| series.summary.p50_us).fold(f64::INFINITY, f64::min);
    let (unit, scale) = if shortest >= 1e4 { ("ms", 1e3) } else { ("us", 1.0) };
    let title = match size {
        0 => format!("{} ({unit})", bench.as_str()),
        size => format!("{}, {} ({unit})", bench.as_str(), about(size)),
    };
    let rated = block.iter().any(|series| series.rate.is_some());
    let compared = block.iter().any(|series| series.ratio.is_some());
    let last = if rated {
        "speed"
    } else if compared {
        "ratio"
    } else {
        ""
    };
    let mut table = Table::new([
        Column::left(&title),
        Column::right("p50"),
        Column::right("p90").optional(),
        Column::right("p99").optional(),
        Column::right("max").optional(),
        Column::right("n").optional(),
        Column::right(last),
        Column::left("").optional(),
    ]);
    let longest = block.iter().map(|series| series.summary.p50_us).fold(0.0, f64::max);
    for series in block {
        let summary = &series.summary;
        let [p50, p90, p99, max] =
            [summary.p50_us, summary.p90_us, summary.p99_us, summary.max_us].map(|us| figure(us / scale));
        let p50 = if summary.is_too_noisy() { format!("{NOISY}{p50}") } else { p50 };
        let compared = match (series.rate, series.ratio) {
            (Some(rate), _) => speed(rate),
            (None, Some(ratio)) => format!("{ratio:.2}"),
            (None, None) => String::new(),
        };
        let bar = bar(summary.p50_us, longest);
        table.row([series.name.clone(), p50, p90, p99, max, summary.count.to_string(), compared, bar]);
    }
    format!("\n{}", table.render(stdout_width()))
}

/// The figures, each with its limits.
fn figures(text: &mut String, figures: &[Figure]) {
    if figures.is_empty() {
        return;
    }
    text.push('\n');
    let name = |figure: &Figure| match figure.size {
        0 => figure.name.clone(),
        size => format!("{}, {}", figure.name, about(size)),
    };
    let width = figures.iter().map(|figure| name(figure).len()).max().unwrap_or(0);
    for each in figures {
        let wanted = match (each.at_most, each.at_least) {
            (Some(most), _) => format!("at most {most}: {}", if each.value <= most { "yes" } else { "NO" }),
            (None, Some(least)) => format!("at least {least}: {}", if each.value >= least { "yes" } else { "NO" }),
            (None, None) => String::new(),
        };
        let row = format!("{:width$}  {:>9} {:3}  {wanted}", name(each), figure(each.value), each.unit);
        let _ = writeln!(text, "{}", row.trim_end());
    }
}

fn foot(report: &BenchReport) -> String {
    let mut text = String::from("\n");
    let noises = || report.series.iter().filter_map(|series| series.summary.noise);
    let noise = match noises().max_by(f64::total_cmp) {
        Some(most) => {
            format!("the medians of a run's fifths differ by at most {:.0} %", most * 100.0)
        }
        None => "unknown with so few samples".to_owned(),
    };
    let floor = report.series.iter().any(|series| series.ratio.is_some());
    let floor = if floor { "; the ratio is to the floor's median" } else { "" };
    let _ = writeln!(text, "noise: {noise}{floor}");
    if report.series.iter().any(|series| series.summary.is_too_noisy()) {
        let most = TOO_NOISY * 100.0;
        let _ = writeln!(
            text,
            "{NOISY} is too noisy for conclusions: its fifths differ by more than {most:.0} %; run it again on an idle machine"
        );
    }
    for left_out in &report.left_out {
        let _ = writeln!(text, "left out: {left_out}");
    }
    text
}

/// Formats a time with three significant digits.
pub(super) fn figure(time: f64) -> String {
    match time.abs() {
        abs if abs < 10.0 => format!("{time:.2}"),
        abs if abs < 100.0 => format!("{time:.1}"),
        _ => format!("{time:.0}"),
    }
}

fn speed(rate: f64) -> String {
    if rate >= 1e12 { format!("{:.2} TB/s", rate / 1e12) } else { format!("{:.1} GB/s", rate / 1e9) }
}

/// Draws a bar in eighths of a cell.
fn bar(value: f64, longest: f64) -> String {
    if longest <= 0.0 {
        return String::new();
    }
    let eighths = (value / longest * (BAR * 8) as f64).round().clamp(1.0, (BAR * 8) as f64) as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.extend(['▏', '▎', '▍', '▌', '▋', '▊', '▉'].get((eighths % 8).wrapping_sub(1)));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::Machine, stats::Summary};

    #[test]
    fn bars_are_as_long_as_their_values() {
        assert_eq!(bar(1.0, 1.0).chars().count(), BAR);
        assert_eq!(bar(0.5, 1.0), "█".repeat(BAR / 2));
        assert_eq!((bar(0.0, 1.0).as_str(), bar(1.0, 8.0 * 24.0).as_str()), ("▏", "▏"));
        assert_eq!(bar(3.0, 0.0), "");
    }

    #[test]
    fn noisy_rows_are_explained_once() {
        let series = |name: &str, noise| {
            let (p50, name) = (12.0, name.to_owned());
            let summary =
                Summary { count: 200, min_us: p50, p50_us: p50, p90_us: p50, p99_us: p50, max_us: p50, noise };
            let (ratio, rate, samples) = (Some(1.0), None, Vec::new());
            Series { bench: Bench::Handoff, name, size: 2 << 20, summary, ratio, rate, samples }
        };
        let all = [series("a", Some(0.5)), series("b", Some(0.1)), series("c", Some(0.3))];
        let table = table(Bench::Handoff, 2 << 20, &all);
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
        let noisy: Vec<bool> = table.lines().skip(2).map(|line| line.contains(" ~12.0 ")).collect();
        assert_eq!(noisy, [true, false, true], "{table}");
        let report = BenchReport {
            schema: 1,
            tool: String::new(),
            made: String::new(),
            backend: Backend::Host,
            machine: Machine::default(),
            count: 200,
            warm_up: 20,
            series: all.to_vec(),
            figures: Vec::new(),
            left_out: Vec::new(),
        };
        assert_eq!(end(&report).matches("too noisy").count(), 1, "{}", end(&report));
    }

    #[test]
    fn figure_is_compared_with_its_target() {
        let figure = |name: &str, size, value, at_most, at_least| {
            let name = name.to_owned();
            Figure { bench: Bench::Broker, name, size, value, unit: "us", at_most, at_least }
        };
        let mut text = String::new();
        figures(
            &mut text,
            &[
                figure("get", 2 << 20, 15.0, Some(15.0), None),
                figure("longer", 0, 15.1, Some(15.0), None),
                figure("rate", 0, 9.0, None, Some(10.0)),
                figure("rate", 0, 10.0, None, Some(10.0)),
                figure("alone", 0, -1.5, None, None),
            ],
        );
        let want = "
get, 2 MiB       15.0 us   at most 15: yes
longer           15.1 us   at most 15: NO
rate             9.00 us   at least 10: NO
rate             10.0 us   at least 10: yes
alone           -1.50 us
";
        assert_eq!(text, want);
        text.clear();
        figures(&mut text, &[]);
        assert_eq!(text, "");
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!([figure(2.3456), figure(23.456), figure(234.56)], ["2.35", "23.5", "235"]);
        assert_eq!([figure(-2.3456), figure(-234.56)], ["-2.35", "-235"]);
        assert_eq!([speed(4.5e12), speed(5e9)], ["4.50 TB/s", "5.0 GB/s"]);
    }
}
