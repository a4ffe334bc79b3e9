//! Draws the distributions: a panel for each bench and size, a row for each measurement.

use std::error::Error as StdError;

use plotters::{
    chart::ChartBuilder,
    coord::ranged1d::IntoSegmentedCoord,
    drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea},
    element::{PathElement, Rectangle},
    prelude::{SVGBackend, SegmentValue},
    style::{Color, IntoFont, RED, RGBColor, TRANSPARENT, WHITE},
};
use vmmfd::error::{Error, Result};

use super::{
    plan::Bench,
    report::{BenchReport, Series},
    stats::{quantile, sorted},
    text::figure,
};
use vmmfd_cli::units::about;

const WIDTH: u32 = 960;
/// The height of a panel's frame, and of each row.
const FRAME: u32 = 90;
const ROW: u32 = 26;
const LABELS: u32 = 250;

const BOX: RGBColor = RGBColor(70, 110, 170);

/// Draws the report as SVG. Each row extends from the smallest sample to the 99th percentile, the box from the 10th percentile to the 90th,
/// and the red mark is the median. The scale is logarithmic.
///
/// # Errors
/// [`Error::System`] if nothing was measured, or the drawing fails.
pub fn draw(report: &BenchReport) -> Result<String> {
    let mut panels: Vec<(Bench, u64, Vec<&Series>)> = Vec::new();
    for series in report.series.iter().filter(|series| !series.samples.is_empty()) {
        match panels.iter_mut().find(|(bench, size, _)| (*bench, *size) == (series.bench, series.size)) {
            Some((_, _, panel)) => panel.push(series),
            None => panels.push((series.bench, series.size, vec![series])),
        }
    }
    if panels.is_empty() {
        return Err(Error::system("draw the picture", std::io::Error::other("nothing was measured")));
    }
    let heights: Vec<u32> = panels.iter().map(|(_, _, panel)| FRAME + ROW * panel.len() as u32).collect();
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, heights.iter().sum())).into_drawing_area();
        root.fill(&WHITE).map_err(unable)?;
        let mut rest = root;
        for ((bench, size, panel), height) in panels.iter().zip(heights) {
            let (area, below) = rest.split_vertically(height);
            let title =
                if *size == 0 { bench.as_str().to_owned() } else { format!("{}, {}", bench.as_str(), about(*size)) };
            draw_panel(&area, &format!("{title} (microseconds)"), panel)?;
            rest = below;
        }
        rest.present().map_err(unable)?;
    }
    Ok(svg)
}

/// The quantiles that a row shows.
struct Spread {
    low: f64,
    tenth: f64,
    median: f64,
    ninetieth: f64,
    high: f64,
}

impl Spread {
    /// Logarithms, since plotters' own logarithmic scale has labels only at powers of ten.
    fn of(series: &Series) -> Self {
        let sorted = sorted(&series.samples);
        let at = |part| quantile(&sorted, part).unwrap_or(0.0).max(0.01).log10();
        Self { low: at(0.0), tenth: at(0.1), median: at(0.5), ninetieth: at(0.9), high: at(0.99) }
    }
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    panel: &[&Series],
) -> Result<()> {
    let spreads: Vec<Spread> = panel.iter().map(|series| Spread::of(series)).collect();
    let low = spreads.iter().map(|spread| spread.low).fold(f64::MAX, f64::min) - 0.05;
    let high = spreads.iter().map(|spread| spread.high).fold(f64::MIN, f64::max) + 0.05;
    let rows = i32::try_from(panel.len()).unwrap_or(i32::MAX);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18).into_font())
        .margin(8)
        .x_label_area_size(26)
        .y_label_area_size(LABELS)
        .build_cartesian_2d(low..high, (0..rows - 1).into_segmented())
        .map_err(unable)?;
    // The first row is at the top.
    let name = |value: &SegmentValue<i32>| match value {
        SegmentValue::CenterOf(row) => {
            let series = usize::try_from(rows - 1 - row).ok().and_then(|row| panel.get(row));
            series.map_or_else(String::new, |series| series.name.clone())
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(8)
        .y_labels(panel.len())
        .y_label_formatter(&name)
        .x_label_formatter(&|power| figure(10f64.powf(*power)))
        .draw()
        .map_err(unable)?;
    for (spread, row) in spreads.iter().zip((0..rows).rev()) {
        let (middle, below, above) =
            (SegmentValue::CenterOf(row), SegmentValue::Exact(row), SegmentValue::Exact(row + 1));
        let line =
            |from: f64, to: f64, at: SegmentValue<i32>| PathElement::new(vec![(from, at.clone()), (to, at)], BOX);
        let box_style = BOX.mix(0.45).filled();
        let elements = [line(spread.low, spread.tenth, middle.clone()), line(spread.ninetieth, spread.high, middle)];
        chart.draw_series(elements).map_err(unable)?;
        let corners = [(spread.tenth, below.clone()), (spread.ninetieth.max(spread.tenth + 0.001), above.clone())];
        let mut body = Rectangle::new(corners, box_style);
        body.set_margin(5, 5, 0, 0);
        chart.draw_series([body]).map_err(unable)?;
        let mark = PathElement::new(vec![(spread.median, below), (spread.median, above)], RED.stroke_width(2));
        chart.draw_series([mark]).map_err(unable)?;
    }
    Ok(())
}

fn unable<E: StdError + Send + Sync + 'static>(error: DrawingAreaErrorKind<E>) -> Error {
    Error::system("draw the picture", std::io::Error::other(error.to_string()))
}
