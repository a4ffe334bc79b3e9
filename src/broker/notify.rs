//! Notifies the init, as described in sd_notify(3).

use std::{
    os::unix::{ffi::OsStrExt, net::UnixDatagram},
    path::Path,
    time::Duration,
};

use rustix::net::{SendFlags, SocketAddrUnix, sendto};

/// Sends a notification to the init (`NOTIFY_SOCKET`). Does nothing without one. Does not block.
pub fn notify(text: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(Path::new(&path)),
    };
    let sent = UnixDatagram::unbound()
        .and_then(|socket| Ok(sendto(&socket, text.as_bytes(), SendFlags::DONTWAIT, &address?)?));
    if let Err(error) = sent {
        tracing::debug!(%error, text, "cannot notify the init");
    }
}

/// The watchdog interval of the init for this process, if any (`WATCHDOG_USEC`, `WATCHDOG_PID`).
pub(crate) fn watchdog() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let own = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|&micros| own && micros > 0).map(Duration::from_micros)
}
