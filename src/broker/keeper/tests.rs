use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use super::{
    image::Image,
    link::take_over,
    message::{Arrival, Message, receive, send},
    peer::pair,
    *,
};
use crate::{broker::catalogue::SegmentId, channel::Cancel, error::RefusalCode};

/// A store, and the keeper's end of its connection.
struct Ends {
    store: Store,
    keeper: OwnedFd,
    file: File,
}

impl Ends {
    fn new(allowed: usize) -> Self {
        let (ours, keeper) = pair().unwrap();
        Self { store: Store::over(Some(ours), allowed), keeper, file: File::open("/dev/null").unwrap() }
    }

    fn replace_keeper(&mut self, keeper: OwnedFd) {
        // A child that another test forks may still have the descriptor.
        rustix::net::shutdown(&self.keeper, rustix::net::Shutdown::Both).unwrap();
        self.keeper = keeper;
    }

    fn flush(&mut self) -> Flushed {
        self.store.flush(|_| Some(self.file.as_fd()))
    }

    fn next(&self) -> Option<Message> {
        match receive(&self.keeper).unwrap() {
            Arrival::Message(message, fds) => {
                if let Message::Hold(names) = &message {
                    assert_eq!(names.len(), fds.len());
                }
                Some(message)
            }
            _ => None,
        }
    }

    fn all(&self) -> Vec<Message> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn answer(&mut self, message: &Message) {
        send(&self.keeper, message, &[]).unwrap();
        self.store.read();
    }
}

fn id(index: usize) -> SegmentId {
    SegmentId::at(index).unwrap()
}

fn hold(names: &[&str]) -> Message {
    Message::Hold(names.iter().map(|name| (*name).to_owned()).collect())
}

fn remove(names: &[&str]) -> Message {
    Message::Remove(names.iter().map(|name| (*name).to_owned()).collect())
}

/// Server and keeper may come from different builds: changing these bytes, or `PROOF`, requires another `VERSION`.
#[test]
fn messages_round_trip() {
    let (ours, theirs) = pair().unwrap();
    let file = File::open("/dev/null").unwrap();
    let messages: [(Message, &[u8]); 13] = [
        (Message::Hello { version: 7, resends: true }, b"H\x07\0\0\0\x01"),
        (Message::Welcome { version: 8, allowed: 1 << 40 }, b"W\x08\0\0\0\0\0\0\0\0\x01\0\0"),
        (Message::Refused("why".to_owned()), b"Xwhy"),
        (hold(&["1z", ".CAT0"]), b"K\x021z\x05.CAT0"),
        (remove(&["a"]), b"R\x01a"),
        (Message::Complete(true), b"C\x01"),
        (Message::Complete(false), b"C\0"),
        (Message::Received(9), b"A\x09\0\0\0\0\0\0\0"),
        (Message::Sync(10), b"Y\x0a\0\0\0\0\0\0\0"),
        (Message::Synced(11), b"Z\x0b\0\0\0\0\0\0\0"),
        (Message::Serving, b"S"),
        (Message::Stopping("2 objects".to_owned()), b"E2 objects"),
        (Message::Reload, b"L"),
    ];
    for (message, bytes) in messages {
        let fds: Vec<BorrowedFd<'_>> = match &message {
            Message::Hold(names) => names.iter().map(|_| file.as_fd()).collect(),
            _ => Vec::new(),
        };
        send(&ours, &message, &fds).unwrap();
        let mut sent = [0; 64];
        let (length, _) = rustix::net::recv(&theirs, &mut sent, rustix::net::RecvFlags::PEEK).unwrap();
        assert_eq!(&sent[..length], bytes, "{message:?}");
        match receive(&theirs).unwrap() {
            Arrival::Message(received, came) => assert_eq!((&received, came.len()), (&message, fds.len())),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(receive(&theirs).unwrap(), Arrival::Nothing));
    drop(ours);
    assert!(matches!(receive(&theirs).unwrap(), Arrival::End));
}

#[test]
fn malformed_records_are_errors() {
    let (ours, theirs) = pair().unwrap();
    let long = [&[b'K', 33][..], &[b'a'; 33]].concat();
    for record in [&b"?"[..], b"H", b"K\x05ab", b"R\x00", b"R\x01:", b"K\x01a", b"Y1", &long] {
        rustix::net::send(&ours, record, rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(receive(&theirs).unwrap_err().kind(), std::io::ErrorKind::InvalidData, "{record:?}");
    }
}

#[test]
fn descriptors_are_sent_in_windows() {
    let mut ends = Ends::new(10_000);
    (0..2000).for_each(|index| ends.store.hold(id(index)));
    let mark = ends.store.mark();
    let mut names = Vec::new();
    let mut records = 0;
    let mut full = 0;
    while ends.flush() == Flushed::Full {
        assert!(!ends.store.holds(mark));
        full += 1;
        let came: Vec<String> = ends
            .all()
            .into_iter()
            .flat_map(|message| match message {
                Message::Hold(names) => names,
                other => panic!("{other:?}"),
            })
            .collect();
        // No acknowledgement: nothing more is sent.
        assert!(came.len() <= WINDOW && ends.flush() == Flushed::Full && ends.next().is_none());
        ends.answer(&Message::Received(came.len() as u64));
        names.extend(came);
        records += 1;
    }
    names.extend(ends.all().into_iter().flat_map(|message| match message {
        Message::Hold(names) => names,
        other => panic!("{other:?}"),
    }));
    assert!(ends.store.holds(mark) && full >= 3, "{full} windows");
    assert!(records < 20, "{records}");
    assert_eq!(names, (0..2000).map(|index| id(index).name()).collect::<Vec<_>>());
}

#[test]
fn order_is_kept_without_dropped_segments() {
    let mut ends = Ends::new(100);
    ends.store.hold(id(1));
    ends.flush();
    ends.store.hold(id(2));
    ends.store.hold(id(3));
    [1, 2].into_iter().for_each(|index| ends.store.remove(Name::Segment(id(index))));
    // The number is reused at once.
    ends.store.hold(id(2));
    let mark = ends.store.mark();
    let file = File::open("/dev/null").unwrap();
    // Another segment now has the number 2, and none has 3.
    assert_eq!(ends.store.flush(|of| (of != id(3)).then(|| file.as_fd())), Flushed::All);
    assert_eq!(ends.all(), [hold(&["1"]), hold(&["2"]), remove(&["1", "2"]), hold(&["2"])]);
    assert!(ends.store.holds(mark));
}

#[test]
fn only_a_synced_mark_is_confirmed() {
    let mut ends = Ends::new(100);
    ends.store.hold(id(1));
    let mark = ends.store.sync();
    assert_eq!(ends.flush(), Flushed::All);
    assert!(ends.store.holds(mark) && !ends.store.is_confirmed(mark));
    let Some(Message::Sync(number)) = ends.all().pop() else { panic!("no sync") };
    ends.answer(&Message::Synced(number));
    assert!(ends.store.is_confirmed(mark));
    let later = ends.store.sync();
    assert!(!ends.store.is_confirmed(later));
}

#[test]
fn descriptors_beyond_the_limit_are_refused() {
    let mut ends = Ends::new(10);
    (0..8).for_each(|index| ends.store.hold(id(index)));
    assert!(ends.store.require_room(2).is_ok());
    let refusal = ends.store.require_room(3).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::Full);
    assert!(
        refusal.message.contains("holds 8 descriptors and has no room for 3 more")
            && refusal.message.contains("LimitNOFILE")
    );
}

#[test]
fn next_keeper_counts_after_its_welcome() {
    let mut ends = Ends::new(100);
    ends.store.hold(id(1));
    ends.flush();
    let (ours, keeper) = pair().unwrap();
    ends.replace_keeper(keeper);
    ends.store.read();
    // Without a connection nothing counts as held.
    assert_eq!(ends.flush(), Flushed::Gone);
    ends.store.hold(id(2));
    assert!(!ends.store.holds(ends.store.mark()));
    ends.store.start_over(ours).unwrap();
    assert_eq!(ends.store.room().0, 0);
    [1, 2].into_iter().for_each(|index| ends.store.hold(id(index)));
    ends.store.complete();
    let mark = ends.store.mark();
    assert_eq!(ends.flush(), Flushed::All);
    let hello = Message::Hello { version: VERSION, resends: true };
    assert_eq!(ends.all(), [hello, hold(&["1", "2"]), Message::Complete(true)]);
    // The keeper may still refuse this server.
    assert!(!ends.store.holds(mark) && ends.store.unsent().is_none());
    ends.answer(&Message::Welcome { version: VERSION, allowed: 7 });
    assert!(ends.store.holds(mark) && ends.store.unsent().is_some_and(|unsent| unsent.is_empty()));
    assert_eq!(ends.store.room(), (2, 7));
}

/// A partial handover is used only if the keeper is dead: a living keeper still has everything.
#[test]
fn only_a_dead_keeper_leaves_partial_handover() {
    let part_of_a_handover = |keeper: &std::process::Child| {
        let (ours, theirs) = pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        send(&theirs, &hold(&[".CAT0"]), &[file.as_fd()]).unwrap();
        nix::sys::socket::shutdown(theirs.as_raw_fd(), nix::sys::socket::Shutdown::Write).unwrap();
        take_over(
            ours,
            Process::of(keeper.id().cast_signed()),
            Link::Pair(Image::of_this_process().unwrap()),
            &Cancel::new().unwrap(),
        )
    };
    let mut keeper = std::process::Command::new("sleep").arg("3600").spawn().unwrap();
    let alive = part_of_a_handover(&keeper).map(drop);
    keeper.kill().unwrap();
    let dead = part_of_a_handover(&keeper);
    keeper.wait().unwrap();
    assert!(alive.unwrap_err().to_string().starts_with("it aborted the handover"));
    assert!(!dead.unwrap().whole);
}

#[test]
fn refusal_keeps_nothing() {
    let mut ends = Ends::new(100);
    let (ours, keeper) = pair().unwrap();
    ends.replace_keeper(keeper);
    ends.store.start_over(ours).unwrap();
    ends.store.hold(id(1));
    let mark = ends.store.mark();
    ends.answer(&Message::Refused("another server".to_owned()));
    assert!(!ends.store.holds(mark));
    assert_eq!(ends.flush(), Flushed::Gone);
}

#[test]
fn everything_counts_as_held_without_keeper() {
    let mut store = Store::none();
    store.hold(id(1));
    store.keep_own(Name::Socket, File::open("/dev/null").unwrap().into());
    store.remove(Name::Segment(id(1)));
    assert!(store.holds(store.mark()) && store.require_room(usize::MAX / 8).is_ok());
    assert_eq!(store.flush(|_| unreachable!("no descriptor is asked for")), Flushed::All);
}

#[test]
fn names_are_parsed_as_written() {
    let names = [Name::Catalogue(false), Name::Catalogue(true), Name::Device(255), Name::Socket, Name::Segment(id(71))];
    let texts: Vec<String> = names.iter().map(ToString::to_string).collect();
    for (name, text) in names.iter().zip(&texts) {
        assert_eq!(Name::parse(text), Some(*name), "{text}");
    }
    // The keeper hands over in this order.
    assert!(texts.is_sorted() && texts[0].as_str() < "0", "{texts:?}");
    for text in ["", "CAT0", ".CAT2", ".DEV256", ".DEV", "A", "stored", "zzzzz"] {
        assert_eq!(Name::parse(text), None, "{text}");
    }
    let mut inherited = Inherited::default();
    for text in texts.iter().map(String::as_str).chain(["stored"]) {
        inherited.add(text.to_owned(), File::open("/dev/null").unwrap().into());
    }
    assert!(inherited.socket.is_some() && inherited.catalogues.iter().all(Option::is_some));
    assert!(inherited.segments.contains_key(&id(71)) && inherited.devices.contains_key(&255));
    assert_eq!(inherited.others, ["stored"]);
}
