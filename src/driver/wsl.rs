//! Detects WSL2, where the GPU's driver is the Windows driver.

use std::{fs, sync::LazyLock};

/// Whether the machine's kernel is WSL's. Reads `/proc/version` once; `false` if that can't be read. Does not block.
pub(crate) fn is_here() -> bool {
    static HERE: LazyLock<bool> = LazyLock::new(|| {
        fs::read("/proc/version").is_ok_and(|version| is_named_in(&String::from_utf8_lossy(&version)))
    });
    *HERE
}

/// Whether a text of `/proc/version` names WSL's kernel.
pub fn is_named_in(version: &str) -> bool {
    // `microsoft-standard-WSL2`. WSL1 has `Microsoft` and no GPU.
    version.to_ascii_lowercase().contains("microsoft")
}
