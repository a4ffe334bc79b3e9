use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::poll::PollFlags;

use super::{
    entries::Entries,
    link::{pair, ready, take_over},
    message::{Arrival, Message, Piece, Role, receive, send},
    newcomers::Newcomers,
    *,
};
use crate::{channel::Cancel, error::RefusalCode};

/// Entries with the manifest `m` and one descriptor each, except a long entry 7 with 1000 descriptors and a missing entry 9.
struct Sources {
    one: Vec<OwnedFd>,
    many: Vec<OwnedFd>,
}

const LONG: u64 = 7;
const MISSING: u64 = 9;

impl Source for Sources {
    fn manifest(&self, key: u64) -> Option<(Vec<u8>, usize)> {
        let manifest = if key == LONG { vec![b'm'; 40_000] } else { b"m".to_vec() };
        self.descriptors(key).map(|fds| (manifest, fds.len()))
    }

    fn descriptors(&self, key: u64) -> Option<&[OwnedFd]> {
        match key {
            LONG => Some(&self.many),
            MISSING => None,
            _ => Some(&self.one),
        }
    }
}

/// A store, and the keeper's end of its connection.
struct Ends {
    store: Store,
    keeper: OwnedFd,
    sources: Sources,
}

impl Ends {
    fn new(allowed: usize) -> Self {
        let (ours, keeper) = pair().unwrap();
        let file = || OwnedFd::from(File::open("/dev/null").unwrap());
        let many = (0..1000).map(|_| file()).collect();
        Self { store: Store::over(Some(ours), allowed), keeper, sources: Sources { one: vec![file()], many } }
    }

    fn replace_keeper(&mut self, keeper: OwnedFd) {
        // A child that another test forks may still have the descriptor.
        rustix::net::shutdown(&self.keeper, rustix::net::Shutdown::Both).unwrap();
        self.keeper = keeper;
    }

    fn flush(&mut self) -> Flushed {
        self.store.flush(&self.sources)
    }

    fn next(&self) -> Option<Message> {
        match receive(&self.keeper).unwrap() {
            Arrival::Message(message, fds) => {
                if let Message::Entry(piece) = &message {
                    assert_eq!(piece.descriptors, fds.len());
                }
                Some(message)
            }
            _ => None,
        }
    }

    fn answer(&mut self, message: &Message) {
        send(&self.keeper, message, &[]).unwrap();
        self.store.read();
    }
}

fn entry(key: u64) -> Message {
    let manifest = b"m".to_vec();
    Message::Entry(Piece { key, is_first: true, is_last: true, is_update: false, descriptors: 1, manifest })
}

/// Server and keeper may come from different builds: changing this text requires another `VERSION`.
#[test]
fn messages_round_trip() {
    let (ours, theirs) = pair().unwrap();
    let file = File::open("/dev/null").unwrap();
    let text = || "why".to_owned();
    let roles = [Role::NextServer, Role::SameServer, Role::NextKeeper];
    let hellos = roles.map(|role| Message::Hello { version: 7, role });
    let welcome = Message::Welcome { version: 8, allowed: 9 };
    let (refused, stopping, exit) = (Message::Refused(text()), Message::Stopping(text()), Message::Exit(text()));
    let numbers = [Message::Received(9), Message::Sync(10), Message::Synced(11)];
    let others = [Message::Remove(vec![258]), Message::Complete(true), Message::Serving, Message::Listener];
    let messages =
        hellos.into_iter().chain([welcome, refused, stopping, exit, entry(258)]).chain(numbers).chain(others);
    let mut all = Vec::new();
    for message in messages {
        let fds: Vec<BorrowedFd<'_>> = match &message {
            Message::Entry(_) | Message::Listener => vec![file.as_fd()],
            _ => Vec::new(),
        };
        send(&ours, &message, &fds).unwrap();
        let mut sent = [0; 128];
        let (length, _) = rustix::net::recv(&theirs, &mut sent, rustix::net::RecvFlags::PEEK).unwrap();
        all.extend_from_slice(&sent[..length]);
        match receive(&theirs).unwrap() {
            Arrival::Message(received, came) => assert_eq!((&received, came.len()), (&message, fds.len())),
            other => panic!("{other:?}"),
        }
    }
    let want = concat!(
        r#"{"Hello":{"version":7,"role":"NextServer"}}0{"Hello":{"version":7,"role":"SameServer"}}0"#,
        r#"{"Hello":{"version":7,"role":"NextKeeper"}}0{"Welcome":{"version":8,"allowed":9}}0"#,
        r#"{"Refused":"why"}0{"Stopping":"why"}0{"Exit":"why"}0"#,
        r#"{"Entry":{"key":258,"is_first":true,"is_last":true,"is_update":false,"descriptors":1}}0m"#,
        r#"{"Received":9}0{"Sync":10}0{"Synced":11}0{"Remove":[258]}0{"Complete":true}0"Serving"0"Listener"0"#,
    );
    assert_eq!(String::from_utf8(all).unwrap().replace('\0', "0"), want);
    assert!(matches!(receive(&theirs).unwrap(), Arrival::Nothing));
    drop(ours);
    assert!(matches!(receive(&theirs).unwrap(), Arrival::End));
}

#[test]
fn malformed_records_are_errors() {
    let (ours, theirs) = pair().unwrap();
    let lacks_fd = br#"{"Entry":{"key":1,"is_first":true,"is_last":true,"is_update":false,"descriptors":1}}"#;
    let lacks_fd = [&lacks_fd[..], b"\0m"].concat();
    for record in [&b"?"[..], b"\"Serving\"", b"{\"Sync\":-1}\0", b"\"Other\"\0", &lacks_fd] {
        rustix::net::send(&ours, record, rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(receive(&theirs).unwrap_err().kind(), std::io::ErrorKind::InvalidData, "{record:?}");
    }
}

#[test]
fn long_entries_are_sent_in_windows() {
    let mut ends = Ends::new(10_000);
    ends.store.send(LONG, 1000);
    ends.store.send(8, 1);
    let mark = ends.store.mark();
    let mut keeper = Entries::default();
    let mut windows = 0;
    loop {
        let flushed = ends.flush();
        let mut read = 0;
        while let Ok(Arrival::Message(message, fds)) = receive(&ends.keeper) {
            read += fds.len();
            match message {
                Message::Entry(piece) => keeper.take(piece, fds).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        if flushed == Flushed::All {
            break;
        }
        // No acknowledgement: nothing more is sent.
        assert!(read <= WINDOW && ends.flush() == Flushed::Full && ends.next().is_none());
        assert!(!ends.store.is_safe(mark));
        ends.answer(&Message::Received(read as u64));
        windows += 1;
    }
    let held: Vec<_> = keeper.iter().map(|(key, entry)| (key, entry.manifest.len(), entry.fds.len())).collect();
    assert_eq!(held, [(LONG, 40_000, 1000), (8, 1, 1)]);
    assert!(windows == 1 && ends.store.is_safe(mark), "{windows} windows");
}

#[test]
fn entry_counts_when_it_is_whole() {
    let piece = |key, is_first, is_last, is_update, text: &str| {
        let manifest = text.as_bytes().to_vec();
        Piece { key, is_first, is_last, is_update, descriptors: 0, manifest }
    };
    let mut entries = Entries::default();
    let manifests = |entries: &Entries| -> Vec<(u64, String)> {
        entries.iter().map(|(key, entry)| (key, String::from_utf8(entry.manifest.clone()).unwrap())).collect()
    };
    entries.take(piece(1, true, true, false, "old"), Vec::new()).unwrap();
    entries.take(piece(1, true, false, false, "n"), Vec::new()).unwrap();
    assert_eq!(manifests(&entries), [(1, "old".to_owned())]);
    // Another entry begins: the rest of the first one will not follow.
    entries.take(piece(2, true, true, false, "two"), Vec::new()).unwrap();
    assert!(entries.take(piece(1, false, true, false, "ew"), Vec::new()).is_err());
    entries.take(piece(1, true, true, true, "new"), Vec::new()).unwrap();
    assert_eq!(manifests(&entries), [(1, "new".to_owned()), (2, "two".to_owned())]);
    assert!(entries.take(piece(3, true, true, true, "no such entry"), Vec::new()).is_err());
}

#[test]
fn descriptors_beyond_the_limit_are_refused() {
    let mut ends = Ends::new(10);
    (1..5).for_each(|key| ends.store.send(key, 2));
    assert!(ends.store.require_room(2).is_ok());
    let refusal = ends.store.require_room(3).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::Full);
    assert!(
        refusal.message.contains("holds 8 descriptors and has no room for 3 more")
            && refusal.message.contains("LimitNOFILE")
    );
}

/// A partial handover is used only if the keeper is dead: a living keeper still has everything.
#[test]
fn only_a_dead_keeper_leaves_partial_handover() {
    let part_of_a_handover = |keeper: &std::process::Child| {
        let (ours, theirs) = pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        send(&theirs, &Message::Welcome { version: VERSION, allowed: 10 }, &[]).unwrap();
        send(&theirs, &entry(0), &[file.as_fd()]).unwrap();
        nix::sys::socket::shutdown(theirs.as_raw_fd(), nix::sys::socket::Shutdown::Write).unwrap();
        take_over(
            ours,
            Process::of(keeper.id().cast_signed()),
            Link::to(Path::new("/no/such/keeper.sock")),
            &Cancel::new().unwrap(),
        )
    };
    let mut keeper = std::process::Command::new("sleep").arg("3600").spawn().unwrap();
    let alive = part_of_a_handover(&keeper).map(drop);
    keeper.kill().unwrap();
    let dead = part_of_a_handover(&keeper);
    keeper.wait().unwrap();
    assert!(alive.unwrap_err().in_full().contains("it aborted the handover"));
    assert!(!dead.unwrap().whole);
}

/// A twin that takes over may close a connection although the kernel has reported the twin to its peer.
#[test]
fn connections_without_an_answer_are_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cancel) = (folder.path().join("keeper.sock"), Cancel::new().unwrap());
    let newcomers = Newcomers::at(&path, &cancel).unwrap();
    let (socket, process) = link::dial(&path, Duration::ZERO, &cancel).unwrap();
    let keeper = std::thread::spawn(move || {
        let accept = || {
            assert!(ready(newcomers.listener(), PollFlags::POLLIN, Duration::from_secs(60)));
            rustix::net::accept(newcomers.listener()).unwrap()
        };
        drop(accept());
        let socket = accept();
        send(&socket, &Message::Welcome { version: VERSION, allowed: 10 }, &[]).unwrap();
        send(&socket, &Message::Complete(true), &[]).unwrap();
        socket
    });
    let taken = take_over(socket, process, Link::to(&path), &cancel);
    keeper.join().unwrap();
    assert!(taken.unwrap().whole);
}

/// The kernel has reported the first keeper to their peers.
#[test]
fn next_keeper_drops_queued_connections() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cancel) = (folder.path().join("keeper.sock"), Cancel::new().unwrap());
    let first = Newcomers::at(&path, &cancel).unwrap();
    let dial = || link::dial(&path, Duration::ZERO, &cancel).unwrap().0;
    let queued = dial();
    let _next = Newcomers::inherited(first.listener().try_clone_to_owned().unwrap(), &path, &cancel).unwrap();
    assert!(matches!(receive(&queued).unwrap(), Arrival::End));
    assert!(matches!(receive(dial()).unwrap(), Arrival::Nothing));
}

#[test]
fn refusal_keeps_nothing() {
    let mut ends = Ends::new(100);
    let (ours, keeper) = pair().unwrap();
    ends.replace_keeper(keeper);
    ends.store.start_over(ours).unwrap();
    ends.store.send(1, 1);
    let mark = ends.store.mark();
    ends.answer(&Message::Refused("another server".to_owned()));
    assert!(!ends.store.is_safe(mark));
    assert_eq!(ends.flush(), Flushed::Gone);
}
