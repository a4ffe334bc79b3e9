//! Leases of a client whose broker restarts.

use super::*;

/// Replaces the broker that a reader is connected to.
fn broker_dies(reader: &mut Reader, broker: &Scripted, instance: &str) -> Peer {
    reader.hang_up();
    broker.greet(instance)
}

#[test]
fn idle_client_resumes_its_leases() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 2, true);
    assert!(reader.leases.iter().all(Lease::is_held));
    let object = reader.leases.pop().unwrap().open(&subject.driver, None).unwrap();
    for _ in 0..3 {
        let peer = broker_dies(&mut reader, &broker, FIRST);
        let resume = peer.resume();
        assert_eq!(tokens(resume.leases), [token(1), token(2)]);
        // The leases are not held until the broker answers.
        assert!(!object.is_held() && !reader.leases[0].is_held());
        peer.resumed(FIRST, &[]);
        // The client also resumes the put: only the broker knows whether the name's lifetime depends on its maker.
        let puts = peer.resume();
        assert_eq!(puts.puts, [reader.put.request.unwrap()]);
        peer.resumed(FIRST, &[]);
        reader.peer = peer;
        for _ in 0..2 {
            let Restored { name, version, id, rebuilt, .. } = reader.restored();
            assert_eq!((name.as_str(), version, id.as_str(), rebuilt), ("a", 5, FIRST, false));
        }
        assert!(object.is_held() && reader.leases[0].is_held());
    }
    // A drop releases the lease as usual.
    drop(object);
    assert_eq!(reader.peer.next().0, Message::Release(Release { token: token(2) }));
    // So does dropping the client, and its connection closes: the watching thread does not keep it open.
    drop((reader.leases, reader.client));
    assert_eq!(reader.peer.next().0, Message::Release(Release { token: token(1) }));
    assert!(reader.peer.0.receive().unwrap().is_none());
}

/// The check is about the program's calls: C's `stop` is one, and remains true.
#[test]
fn true_check_keeps_resuming() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let stopped = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stopped);
    let cancel = Cancel::new().unwrap().with_check(move || seen.load(Ordering::Relaxed));
    let config = Config::default().timeout(PATIENCE).cancel(&cancel);
    let mut reader = Reader::with(&broker, &subject, 1, true, config);
    stopped.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        reader.hang_up();
        let peer = broker.greet(FIRST);
        // Longer than the client waits without calling checks.
        thread::sleep(Duration::from_millis(100));
        peer.take_up(FIRST, &[], false);
        reader.peer = peer;
        reader.restored();
        assert!(reader.leases[0].is_held());
    }
}

#[test]
fn lease_released_during_resume_ends() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 3, true);
    reader.hang_up();
    // Without a connection, the client forgets a dropped lease.
    reader.leases.remove(0);
    let peer = broker.greet(FIRST);
    assert_eq!(tokens(peer.resume().leases), [token(2), token(3)]);
    // During the resume, the broker gets the release at the latest after the resume.
    reader.leases.remove(0);
    peer.resumed(FIRST, &[]);
    let release = Message::Release(Release { token: token(2) });
    let mut released = 0;
    loop {
        match peer.next().0 {
            message if message == release => released += 1,
            Message::Resume(_) => {
                peer.resumed(FIRST, &[]);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    // The dropping thread may send a release before the resume takes effect, so the client sends another release afterwards.
    assert_eq!(peer.next().0, release);
    assert!(released <= 1);
    reader.restored();
    assert!(reader.leases[0].is_held());
}

#[test]
fn release_does_not_wait_for_broker() {
    const LEASES: u8 = 120;
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, LEASES, true);
    // The kernel's minimum: space for a few records.
    sockopt::set_socket_send_buffer_size(&reader.client, 1).unwrap();
    let release = |peer: &Peer| match peer.next().0 {
        Message::Release(release) => release.token,
        other => panic!("{other:?}"),
    };
    let all: Vec<Token> = (1..=LEASES).map(token).collect();
    drop(reader.leases.split_off(usize::from(LEASES / 2)));
    // The client sends the releases once the broker reads, even without another request.
    let told: Vec<Token> = (LEASES / 2..LEASES).map(|_| release(&reader.peer)).collect();
    assert_eq!(sorted(told), all[usize::from(LEASES / 2)..]);
    // The releases precede the next request.
    reader.leases.clear();
    let listing = ask(&reader.client, move |client| client.list(""));
    let told: Vec<Token> = (0..LEASES / 2).map(|_| release(&reader.peer)).collect();
    assert_eq!(sorted(told), all[..usize::from(LEASES / 2)]);
    assert!(matches!(reader.peer.next().0, Message::List(_)));
    reader.peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert_eq!(listing.join().unwrap().unwrap(), []);
}

#[test]
fn ended_lease_is_lost_for_good() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 2, true);
    let object = reader.leases.remove(1).open(&subject.driver, None).unwrap();
    let peer = broker_dies(&mut reader, &broker, FIRST);
    peer.take_up(FIRST, &[token(2)], true);
    let mut notices = [reader.notice(), reader.notice()];
    notices.sort_by_key(|notice| notice.is_err());
    let [Ok(_), Err(lost)] = notices else { panic!("{notices:?}") };
    assert_eq!((lost.reason, lost.name.as_str(), lost.version), (LossReason::Ended, "a", 5));
    assert!(!object.is_held() && reader.leases[0].is_held());
    // The memory is still mapped.
    let mut byte = [0];
    object.part("all").unwrap().memory().unwrap().copy_out(MIB, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    // The client asks for neither the lost lease nor the lost put again.
    reader.peer = peer;
    let peer = broker_dies(&mut reader, &broker, OTHER);
    let resume = peer.resume();
    assert_eq!((tokens(resume.leases), resume.puts), (vec![token(1)], Vec::new()));
}

#[test]
fn handlers_make_requests_with_their_client() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 1, true);
    let (say, answers) = mpsc::channel();
    reader.client.on_lost(move |client, lost| drop(say.send((client.list(&lost.name), client.peer().pid))));
    let peer = broker_dies(&mut reader, &broker, FIRST);
    peer.take_up(FIRST, &[token(1)], true);
    // The release of the lost lease.
    assert!(matches!(peer.next().0, Message::Release(_)));
    let asked = peer.next().0;
    assert!(matches!(&asked, Message::List(list) if list.prefix == "a"), "{asked:?}");
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    let (listed, pid) = answers.recv_timeout(PATIENCE).unwrap();
    assert_eq!((listed.unwrap(), pid), (Vec::new(), std::process::id() as i32));
    // The handler does not keep the connection open: it closes after the lease is released.
    drop(reader);
    while let Some((message, _)) = peer.0.receive().unwrap() {
        assert!(matches!(message, Message::Release(_)), "{message:?}");
    }
}

#[test]
fn lost_version_is_offered_until_answered() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 3, true);
    let _object = reader.leases.pop().unwrap().open(&subject.driver, None).unwrap();
    // An unanswered offer is repeated.
    let mut offered = |puts_lost: bool| {
        let peer = broker_dies(&mut reader, &broker, OTHER);
        peer.take_up(OTHER, &[1, 2, 3].map(token), puts_lost);
        let (offer, fds) = peer.put();
        (peer, offer, fds)
    };
    drop(offered(false));
    let (peer, offer, fds) = offered(true);
    let restore = offer.restore.clone().unwrap();
    assert_eq!((restore.version, restore.id.as_str(), restore.created_ms), (5, FIRST, 1_700_000_000_123));
    assert_eq!((restore.owner, sorted(restore.leases)), (OWNER, vec![token(1), token(2), token(3)]));
    // The offer equals the original put.
    let (was, is) = (&reader.put, &offer);
    assert_eq!((&was.parts, &was.metadata, &was.sizes), (&is.parts, &is.metadata, &is.sizes));
    assert_eq!((&was.name, &was.backend, fds.len()), (&is.name, &is.backend, was.sizes.len()));
    assert_eq!((is.mode, is.lifetime, is.keep), (Some(0o640), Some(Lifetime::Leased), Some(3)));
    assert!(is.request.is_some() && is.request != was.request);
    assert!(!reader.leases[0].is_held());
    peer.published(FIRST);
    // The broker may refuse some of the offered leases, for example because of a quota.
    assert_eq!(tokens(peer.resume().leases), [token(1), token(2), token(3)]);
    peer.resumed(OTHER, &[token(3)]);
    let notices: Vec<_> = (0..3).map(|_| reader.notice()).collect();
    assert_eq!(notices.iter().filter(|notice| notice.as_ref().is_ok_and(|restored| restored.rebuilt)).count(), 2);
    let not_given = |lost: &Lost| matches!(lost.reason, LossReason::NotRestored(_));
    assert_eq!(notices.iter().filter(|notice| notice.as_ref().is_err_and(not_given)).count(), 1);
    assert!(reader.leases[0].is_held());
    // From now on this broker is authoritative: a lease that it does not resume is lost, and the client offers nothing.
    reader.peer = peer;
    let peer = broker_dies(&mut reader, &broker, OTHER);
    let resume = peer.resume();
    let leases = tokens(resume.leases);
    assert_eq!(leases.len(), 2);
    peer.resumed(OTHER, &leases);
    for _ in 0..2 {
        assert_eq!(reader.lost(), LossReason::Ended);
    }
}

#[test]
fn refused_offer_loses_unless_another_restored() {
    let subject = Subject::host();
    for (faster, whole) in [(true, true), (false, true), (false, false)] {
        let broker = Scripted::new();
        let mut reader = Reader::new(&broker, &subject, 1, whole);
        let peer = broker_dies(&mut reader, &broker, OTHER);
        peer.take_up(OTHER, &[token(1)], false);
        if whole {
            peer.put();
            peer.refuse(RefusalCode::Exists);
        }
        assert_eq!(tokens(peer.resume().leases), [token(1)]);
        let lost = if faster { vec![] } else { vec![token(1)] };
        peer.resumed(OTHER, &lost);
        match faster {
            true => assert!(reader.restored().rebuilt),
            false => assert!(matches!(reader.lost(), LossReason::NotRestored(_))),
        }
        assert_eq!(reader.leases[0].is_held(), faster);
    }
}

#[test]
fn absent_broker_is_reported_until_back() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::with(&broker, &subject, 1, true, Config::default().timeout(A_WHILE));
    let folder = broker.end();
    reader.hang_up();
    let error = reader.client.stat("a", None).unwrap_err();
    // An existing client waits for its timeout, unlike a new one.
    assert!(matches!(error, Error::Peer(PeerError::BrokerGone { waited: A_WHILE, .. })), "{error:?}");
    assert_eq!(error.class(), ErrorClass::Disconnected);
    assert_eq!(reader.lost(), LossReason::Unreachable);
    assert!(!reader.leases[0].is_held());
    let broker = Scripted::again(folder);
    let peer = broker.greet(FIRST);
    assert_eq!(peer.take_up(FIRST, &[], false).0, [token(1)]);
    assert!(!reader.restored().rebuilt);
    assert!(reader.leases[0].is_held());
}

#[test]
fn fork_leaves_the_connection_alone() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let Reader { client, mut leases, peer, notices: _notices, .. } = Reader::new(&broker, &subject, 1, true);
    let mut all = Some((client.clone(), leases.remove(0)));
    in_fork(|| {
        let (client, lease) = all.take().unwrap();
        let refused = matches!(client.list("").unwrap_err(), Error::Misuse { .. }) && !lease.is_held();
        let path = format!("/proc/self/fd/{}", client.as_fd().as_raw_fd());
        let open = || std::fs::read_link(&path).ok();
        let before = open();
        drop((lease, client));
        // The parent's variable is a second reference, and the fork has a copy of it.
        refused && open() == before
    });
    let mut only = Some(client);
    all = None;
    assert!(all.is_none());
    assert!(matches!(peer.next(), (Message::Release(_), _)));
    in_fork(|| {
        let client = only.take().unwrap();
        let path = format!("/proc/self/fd/{}", client.as_fd().as_raw_fd());
        let open = || std::fs::read_link(&path).ok();
        let before = open();
        drop(client);
        before.is_some() && open() != before
    });
    // The parent's connection still works.
    let listing = meanwhile(move || only.take().unwrap().list("").unwrap());
    assert!(matches!(peer.next(), (Message::List(_), _)));
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert!(listing.join().unwrap().is_empty());
}
