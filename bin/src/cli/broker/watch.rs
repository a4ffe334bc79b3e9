//! `watch`: follows the events of a broker's objects.

use std::{
    io::{self, Write},
    os::fd::AsFd,
    str::FromStr,
    thread,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmmfd::{
    broker::{Event, EventKind, WatchPlace, Watched},
    channel::CancelReason,
    internals::{clean, deadline_after, wait},
};

use super::{
    MeetBroker,
    fields::{process, time},
};
use crate::{
    cli::{
        output::{complain, json_line},
        prelude::*,
    },
    schema::{self, VERSION},
    units::about,
};

/// The length of each wait for events; the user does not notice it.
const WAIT: Duration = Duration::from_secs(3600);

/// Follows the events of a broker's objects, one line per event
///
/// The events are published, replaced, deleted, reported (a reader found a false claim), leased and ended (a lease), and recalled (the owner
/// asked for a version), of names that this user may read. A line with lost marks a gap: the events before the next line are unknown. The
/// command reconnects after a restart of the broker. It runs until SIGTERM or SIGINT, or until its output is closed. With --json, each line
/// is an object: first the place of the start, then each event.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal, or its output was closed"; 2 4 5))]
pub(in super::super) struct WatchOptions {
    /// Only events of names that begin with PREFIX
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    /// Start after this event of an earlier watch, as printed by --json [default: now]
    #[arg(long, value_name = "INSTANCE:SEQ", value_parser = parse_place)]
    after: Option<WatchPlace>,

    #[command(flatten)]
    meet: MeetBroker,
}

fn parse_place(text: &str) -> Result<WatchPlace, String> {
    let place = text.rsplit_once(':').and_then(|(instance, seq)| {
        let seq = seq.parse().ok()?;
        // Normalise the UUID to the broker's form.
        let instance = uuid::Uuid::from_str(instance).ok()?.to_string();
        Some(WatchPlace::new(instance, seq))
    });
    place.ok_or_else(|| {
        format!("`{text}` is not the place of an event: write instance and seq of a line of --json, with a colon between them")
    })
}

/// A pipe that polls as writable accepts this many bytes: the smallest `PIPE_BUF` of POSIX.
const PIECE: usize = 512;

/// A line of `--json`.
#[derive(Debug, Serialize, JsonSchema)]
struct Line<'a> {
    schema: u32,
    /// `following`, `lost`, or the kind of the event.
    kind: &'a str,
    /// With `seq`, the place after this line.
    #[schemars(with = "schema::Id")]
    instance: &'a str,
    seq: u64,
    event: Option<&'a Event>,
}

fn kind_name(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Published => "published",
        EventKind::Replaced => "replaced",
        EventKind::Deleted => "deleted",
        EventKind::Reported => "reported",
        EventKind::Leased => "leased",
        EventKind::Ended => "ended",
        EventKind::Recalled => "recalled",
        // From a newer broker.
        _ => "unknown",
    }
}

impl WatchOptions {
    fn line(json: bool, watched: Option<&Watched>, place: &WatchPlace) -> String {
        let event = match watched {
            Some(Watched::Event(event)) => Some(event),
            _ => None,
        };
        let word = match watched {
            None => "following",
            Some(Watched::Event(event)) => kind_name(event.kind),
            Some(_) => "lost",
        };
        if json {
            let WatchPlace { instance, seq, .. } = place;
            return json_line(&Line { schema: VERSION, kind: word, instance, seq: *seq, event });
        }
        let mut line = match event {
            Some(event) => text(event, word),
            None => "lost       the events before the next line are unknown".to_owned(),
        };
        clean(&mut line);
        line + "\n"
    }
}

fn text(event: &Event, word: &str) -> String {
    let Event { at_ms, name, version, uid, pid, command, size, message, .. } = event;
    let size = size.map(|size| format!(", {}", about(size))).unwrap_or_default();
    let by = process(pid, command.as_deref(), *uid);
    let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    format!("{word:<9}  {}  {name} version {version}{size}, {by}{message}", time(*at_ms))
}

impl Tool for WatchOptions {
    const NAME: &'static str = "watch";

    const REPORTS: &'static [Named] = &[("watch", document::<Line<'static>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let mut watch = client.watch(&self.prefix, self.after.as_ref())?;
        end_with_output(cancel)?;
        if output.json {
            if !print(&Self::line(output.json, None, watch.place()), cancel)? {
                return Ok(ended());
            }
        } else if !output.quiet {
            let WatchPlace { instance, seq, .. } = watch.place();
            complain(&format!("watch     following  behind event {seq} of {instance}"));
        }
        loop {
            match watch.next(WAIT) {
                Ok(Some(watched)) => {
                    let line = Self::line(output.json, Some(&watched), watch.place());
                    if !print(&line, cancel)? {
                        return Ok(ended());
                    }
                }
                Ok(None) => {}
                Err(Error::Interrupted { .. }) => return Ok(ended()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn ended() -> ToolOutput {
    ToolOutput { text: String::new(), exit: Exit::Verified }
}

/// Prints and flushes a line. Returns false if the output is closed, or if the command is cancelled while the reader is stuck.
fn print(line: &str, cancel: &Cancel) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    for piece in line.as_bytes().chunks(PIECE) {
        let room = wait(cancel, stdout.as_fd(), PollFlags::POLLOUT, deadline_after(Duration::MAX));
        if matches!(room, Err(Error::Interrupted { .. })) {
            return Ok(false);
        }
        match stdout.write_all(piece) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    match stdout.flush() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Cancels after the last reader closes the output: the next write, which would fail, may be hours away.
fn end_with_output(cancel: &Cancel) -> Result<(), Error> {
    let cancel = cancel.clone();
    let wait = move || {
        let stdout = io::stdout();
        // Without requested events, poll waits only for errors; on a file, forever.
        let mut fds = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
        while poll(&mut fds, PollTimeout::NONE) == Err(nix::errno::Errno::EINTR) {}
        cancel.cancel(CancelReason::Program);
    };
    let spawned = thread::Builder::new().name("output".to_owned()).spawn(wait);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_read_as_printed() {
        let place = parse_place("0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f:17").unwrap();
        assert_eq!((&*place.instance, place.seq), ("0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f", 17));
        for text in ["", "17", ":17", "0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f", "0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f:-1"]
        {
            assert!(parse_place(text).unwrap_err().contains("write "), "{text}");
        }
    }

    #[test]
    fn messages_cannot_forge_lines() {
        let event = Event {
            seq: 3,
            at_ms: 1_000,
            kind: EventKind::Reported,
            name: "models/tiny".to_owned(),
            version: 2,
            id: String::new(),
            uid: 7,
            pid: 9,
            command: Some("cat".to_owned()),
            size: Some(2 << 20),
            message: Some("wrong\npublished".to_owned()),
        };
        let mut line = text(&event, kind_name(event.kind));
        clean(&mut line);
        assert_eq!(
            line,
            "reported   1970-01-01T00:00:01.000Z  models/tiny version 2, 2 MiB, pid 9 (cat), uid 7: wrong published"
        );
    }
}
