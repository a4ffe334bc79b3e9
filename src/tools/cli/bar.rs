//! Progress bars on a terminal.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// A bar that counts bytes.
pub(super) fn progress_bar() -> ProgressBar {
    bar("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
}

/// A bar on standard error, if that is a terminal. It is drawn only when the work takes long enough for a second update.
pub fn bar(template: &str) -> ProgressBar {
    let bar = ProgressBar::new(0).with_finish(ProgressFinish::AndClear);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
