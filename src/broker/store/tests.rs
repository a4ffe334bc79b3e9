use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixDatagram,
    },
    sync::atomic::{AtomicUsize, Ordering},
};

use super::*;

/// A store as its keeper sees it: what comes, and what is kept.
struct KeeperEnd {
    socket: UnixDatagram,
    path: PathBuf,
}

impl KeeperEnd {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vmmfd-store-{}-{count}", std::process::id()));
        let socket = UnixDatagram::bind(&path).unwrap();
        Self { socket, path }
    }

    fn connected(&self) -> UnixDatagram {
        let socket = UnixDatagram::unbound().unwrap();
        socket.connect(&self.path).unwrap();
        socket
    }

    fn store(&self, keeper: Keeper, allowed: usize) -> Store {
        match keeper {
            Keeper::Systemd => Store::connect(&self.path, allowed).unwrap(),
            _ => Store::over(self.connected(), allowed).unwrap(),
        }
    }

    /// The next datagram, and its descriptor.
    fn next(&self) -> Option<(Notice, Option<OwnedFd>)> {
        let (text, mut fds) = crate::broker::supervisor::receive(&self.socket).unwrap()?;
        assert!(fds.len() < 2, "each descriptor has a datagram of its own");
        Some((read_notice(&text), fds.pop()))
    }

    fn all(&self) -> Vec<Notice> {
        std::iter::from_fn(|| self.next()).map(|(notice, _)| notice).collect()
    }
}

impl Drop for KeeperEnd {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn id(index: usize) -> SegmentId {
    SegmentId::at(index).unwrap()
}

fn keep(name: &str) -> Notice {
    Notice::Keep(name.to_owned())
}

fn remove(name: &str) -> Notice {
    Notice::Remove(name.to_owned())
}

#[test]
fn what_is_written_is_what_sd_notify_documents_and_is_read_back() {
    assert_eq!(keep("1z").to_string(), "FDSTORE=1\nFDNAME=1z\nFDPOLL=0");
    assert_eq!(remove("1z").to_string(), "FDSTOREREMOVE=1\nFDNAME=1z");
    for notice in [keep("a"), remove("b"), Notice::Barrier, Notice::Other("READY=1".to_owned())] {
        assert_eq!(read_notice(&notice.to_string()), notice);
    }
    // As others may write it.
    assert_eq!(read_notice("FDNAME=x\nSTATUS=y\nFDSTORE=1\n"), keep("x"));
    assert_eq!(read_notice("FDSTORE=0\nFDNAME=x"), Notice::Other("FDSTORE=0\nFDNAME=x".to_owned()));
}

#[test]
fn a_full_socket_never_blocks_and_the_order_stays() {
    let (keeper, file) = (KeeperEnd::new(), File::open("/dev/null").unwrap());
    let mut store = keeper.store(Keeper::Supervisor, 10_000);
    (0..2000).for_each(|index| store.keep(id(index)));
    let mark = store.mark();
    let (mut names, mut full) = (Vec::new(), 0);
    loop {
        let flushed = store.flush(|_| file.as_fd(), None);
        assert_eq!(store.has_kept(mark), flushed == Flushed::All);
        names.extend(keeper.all());
        match flushed {
            Flushed::All => break,
            _ => full += 1,
        }
    }
    assert!(full > 1, "its queue is shorter than 2000 datagrams");
    assert_eq!(names, (0..2000).map(|index| keep(&id(index).name())).collect::<Vec<_>>());
    assert_eq!(store.room(), (2000, 10_000));
}

#[test]
fn what_goes_before_it_was_sent_is_not_sent_and_what_was_sent_is_removed() {
    let (keeper, file) = (KeeperEnd::new(), File::open("/dev/null").unwrap());
    let mut store = keeper.store(Keeper::Supervisor, 100);
    store.keep(id(1));
    store.flush(|_| file.as_fd(), None);
    store.keep(id(2));
    store.keep(id(3));
    [1, 2].into_iter().for_each(|index| store.remove(Name::Segment(id(index))));
    // The number is given again at once.
    store.keep(id(2));
    let mark = store.mark();
    // The descriptor of the first 2 may be closed by now: it is not asked for.
    let mut asked = Vec::new();
    let asking = std::cell::RefCell::new(&mut asked);
    let fd = |id| -> BorrowedFd<'_> {
        asking.borrow_mut().push(id);
        file.as_fd()
    };
    assert_eq!(store.flush(fd, None), Flushed::All);
    assert_eq!(asked, [id(3), id(2)]);
    assert_eq!(keeper.all(), [keep("1"), keep("3"), remove("1"), keep("2")]);
    assert!(store.has_kept(mark));
    assert_eq!(store.room().0, 2);
}

#[test]
fn with_systemd_something_is_kept_once_the_barrier_behind_it_has_passed() {
    let (keeper, file) = (KeeperEnd::new(), File::open("/dev/null").unwrap());
    let mut store = keeper.store(Keeper::Systemd, 100);
    store.keep(id(1));
    let first = store.mark();
    assert_eq!(store.flush(|_| file.as_fd(), Some(first)), Flushed::All);
    assert_eq!(keeper.next().unwrap().0, keep("1"));
    let (barrier, end) = keeper.next().unwrap();
    assert_eq!(barrier, Notice::Barrier);
    assert!(store.passed_barrier().is_none() && !store.has_kept(first), "it is sent, and not processed");
    // What comes meanwhile has the next barrier.
    store.keep(id(2));
    let second = store.mark();
    assert_eq!(store.flush(|_| file.as_fd(), Some(second)), Flushed::All);
    assert_eq!(keeper.all(), [keep("2")], "one barrier at a time");
    drop(end);
    assert!(store.passed_barrier().is_some());
    assert!(store.has_kept(first) && !store.has_kept(second));
    assert_eq!(store.flush(|_| file.as_fd(), Some(second)), Flushed::All);
    assert_eq!(keeper.all(), [Notice::Barrier], "its end is closed with it");
    assert!(store.passed_barrier().is_some() && store.has_kept(second));
}

#[test]
fn only_a_living_supervisor_confirms() {
    let (keeper, file) = (KeeperEnd::new(), File::open("/dev/null").unwrap());
    let mut store = keeper.store(Keeper::Supervisor, 100);
    store.keep(id(1));
    let mark = store.new_mark();
    for living in [false, true] {
        assert_eq!(store.flush(|_| file.as_fd(), Some(mark)), Flushed::All);
        assert!(store.has_kept(mark), "it is sent");
        assert_eq!(keeper.next().unwrap().0, keep("1"));
        let (barrier, end) = keeper.next().unwrap();
        assert_eq!(barrier, Notice::Barrier);
        if living {
            nix::unistd::write(end.as_ref().unwrap(), &[1]).unwrap();
        }
        drop(end);
        assert_eq!((store.passed_barrier().is_some(), store.is_confirmed(mark)), (living, living));
        if !living {
            store.begin_anew(keeper.connected());
            store.keep(id(1));
        }
    }
}

#[test]
fn what_would_not_fit_is_refused_with_the_figures() {
    let keeper = KeeperEnd::new();
    let mut store = keeper.store(Keeper::Systemd, 10);
    (0..8).for_each(|index| store.keep(id(index)));
    assert!(store.require_room(2, 1).is_ok());
    let refusal = store.require_room(3, 1).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::Full);
    assert!(
        refusal.message.contains("has 8 descriptors, and 3 more") && refusal.message.contains("FileDescriptorStoreMax")
    );
    // One variable of the environment has them all.
    let store = keeper.store(Keeper::Systemd, 1_000_000);
    assert!(store.require_room(NAMES / 5, 4).is_ok());
    let refusal = store.require_room(NAMES / 5 + 1, 4).unwrap_err();
    assert!(refusal.message.contains("names") && refusal.message.contains("larger segments"), "{}", refusal.message);
}

#[test]
fn a_keeper_that_is_gone_is_noticed_and_a_new_one_gets_everything() {
    let (keeper, file) = (KeeperEnd::new(), File::open("/dev/null").unwrap());
    let mut store = keeper.store(Keeper::Supervisor, 100);
    store.keep(id(1));
    store.flush(|_| file.as_fd(), None);
    let path = keeper.path.clone();
    drop(keeper);
    store.keep(id(2));
    assert_eq!(store.flush(|_| file.as_fd(), None), Flushed::Gone);
    let keeper = KeeperEnd { socket: UnixDatagram::bind(&path).unwrap(), path };
    assert!(store.has_kept(store.mark()), "there is none to wait for");
    store.begin_anew(keeper.connected());
    assert_eq!(store.room().0, 0);
    [1, 2].into_iter().for_each(|index| store.keep(id(index)));
    let mark = store.mark();
    assert!(!store.has_kept(mark));
    assert_eq!(store.flush(|_| file.as_fd(), None), Flushed::All);
    assert!(store.has_kept(mark));
    assert_eq!(keeper.all(), [keep("1"), keep("2")]);
}

#[test]
fn without_a_store_everything_is_kept_and_nothing_is_said() {
    let mut store = Store::none();
    store.keep(id(1));
    store.keep_own(Name::Socket, File::open("/dev/null").unwrap().into());
    store.remove(Name::Segment(id(1)));
    store.say("READY=1");
    assert!(store.has_kept(store.mark()) && store.require_room(usize::MAX / 8, 4).is_ok());
    assert_eq!(store.flush(|_| unreachable!("no descriptor is asked for"), None), Flushed::All);
}

#[test]
fn what_a_store_gives_back_is_sorted_by_its_names() {
    let file = || -> OwnedFd { File::open("/dev/null").unwrap().into() };
    let names = ["SOCK", "CAT1", "1z", "0", "LIFE", "D0A", "stored", "0", "CAT9", "PEER"];
    let inherited = Inherited::of(names.into_iter().map(|name| (name.to_owned(), file())).collect());
    assert!(inherited.socket.is_some() && inherited.life.is_some() && inherited.peer.is_some());
    assert!(inherited.catalogues[0].is_none() && inherited.catalogues[1].is_some());
    assert_eq!(inherited.segments.len(), 2);
    assert!(inherited.segments.contains_key(&id(71)) && inherited.devices.contains_key(&10));
    let others: Vec<&str> = inherited.others.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(others, ["stored", "0", "CAT9"]);
    for name in [Name::Segment(id(71)), Name::Socket, Name::Catalogue(true), Name::Device(10)] {
        assert_eq!(name.to_string().len(), name.length());
    }
}
