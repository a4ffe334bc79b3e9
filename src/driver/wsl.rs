//! Whether this is WSL2, where the GPU's driver is that of Windows.

use std::fs;

/// Whether the kernel of this machine is WSL's. Reads `/proc/version`; does not block. `false` if that can't be read.
pub fn is_here() -> bool {
    fs::read("/proc/version").is_ok_and(|version| is_named_in(&String::from_utf8_lossy(&version)))
}

/// Whether the text of `/proc/version` is of WSL's kernel.
pub fn is_named_in(version: &str) -> bool {
    // `microsoft-standard-WSL2`; version 1 says `Microsoft` and has no GPU.
    version.to_ascii_lowercase().contains("microsoft")
}
