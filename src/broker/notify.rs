//! What an init that speaks the protocol of sd_notify(3) is told.

use std::{
    os::unix::{ffi::OsStrExt, net::UnixDatagram},
    path::Path,
    time::Duration,
};

use rustix::net::{SendFlags, SocketAddrUnix, sendto};

/// Tells the init that started this process (`NOTIFY_SOCKET`). Does nothing if none is to be told. Does not block.
pub fn notify(text: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(Path::new(&path)),
    };
    let sent = UnixDatagram::unbound()
        .and_then(|socket| Ok(sendto(&socket, text.as_bytes(), SendFlags::DONTWAIT, &address?)?));
    if let Err(error) = sent {
        tracing::debug!(%error, text, "the init can't be told");
    }
}

/// How often the init must hear `WATCHDOG=1` from this process, if it watches it (`WATCHDOG_USEC`, `WATCHDOG_PID`).
pub(crate) fn watchdog() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let own = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|&micros| own && micros > 0).map(Duration::from_micros)
}
