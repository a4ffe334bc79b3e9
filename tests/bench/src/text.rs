//! A report as text: tables, with a bar for each median.

use std::fmt::Write;

use vmmfd::driver::Backend;

use super::{
    plan::Bench,
    report::{BenchReport, Figure, Series},
};
use vmmfd_cli::units::about;

/// The length of the longest bar, in cells.
const BAR: usize = 24;

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
        (Backend::Host, _) => "host memory: no GPU is measured".to_owned(),
        (Backend::Cuda, module) => {
            let module = module.as_ref().map_or(String::new(), |module| format!("driver {module}, "));
            format!("{module}CUDA {}.{}", machine.cuda / 1000, machine.cuda % 1000 / 10)
        }
    };
    let device =
        if machine.device.is_empty() { String::new() } else { format!("{} {}, ", machine.device, machine.uuid) };
    format!(
        "{} bench, {}, backend {}\n{device}{driver}, Linux {}, {} CPUs\n{} samples of each after {} that do not count, and fewer of slow measurements (column n)\n",
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
    let name = block.iter().map(|series| series.name.len()).chain([title.len()]).max().unwrap_or(0).max(24);
    let rated = block.iter().any(|series| series.rate.is_some());
    let compared = block.iter().any(|series| series.ratio.is_some());
    let last = if rated {
        "speed"
    } else if compared {
        "ratio"
    } else {
        ""
    };
    let head = format!("{title:name$}  {:>9} {:>9} {:>9} {:>9} {:>5} {last:>9}", "p50", "p90", "p99", "max", "n");
    let mut text = format!("\n{}\n", head.trim_end());
    let longest = block.iter().map(|series| series.summary.p50_us).fold(0.0, f64::max);
    for series in block {
        let summary = &series.summary;
        let [p50, p90, p99, max] =
            [summary.p50_us, summary.p90_us, summary.p99_us, summary.max_us].map(|us| figure(us / scale));
        let compared = match (series.rate, series.ratio) {
            (Some(rate), _) => speed(rate),
            (None, Some(ratio)) => format!("{ratio:.2}"),
            (None, None) => String::new(),
        };
        let row = format!(
            "{:name$}  {p50:>9} {p90:>9} {p99:>9} {max:>9} {:>5} {compared:>9}  {}",
            series.name,
            summary.count,
            bar(summary.p50_us, longest)
        );
        // Writing to a string can't fail.
        let _ = writeln!(text, "{}", row.trim_end());
    }
    text
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
            format!("the medians of a run's fifths differ by at most {:.0} % of its median", most * 100.0)
        }
        None => "unknown with so few samples".to_owned(),
    };
    let floor = report.series.iter().any(|series| series.ratio.is_some());
    let floor = if floor { "; the ratio is to the floor's median" } else { "" };
    let _ = writeln!(text, "noise: {noise}{floor}");
    for series in report.series.iter().filter(|series| series.summary.is_too_noisy()) {
        let size = if series.size == 0 { String::new() } else { format!(" at {}", about(series.size)) };
        let _ = writeln!(
            text,
            "too noisy for conclusions: {} {}{size}, whose fifths differ by {:.0} %; run it again on an idle machine",
            series.bench.as_str(),
            series.name,
            series.summary.noise.unwrap_or_default() * 100.0
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

    #[test]
    fn bars_are_as_long_as_their_values() {
        assert_eq!(bar(1.0, 1.0).chars().count(), BAR);
        assert_eq!(bar(0.5, 1.0), "█".repeat(BAR / 2));
        assert_eq!((bar(0.0, 1.0).as_str(), bar(1.0, 8.0 * 24.0).as_str()), ("▏", "▏"));
        assert_eq!(bar(3.0, 0.0), "");
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
