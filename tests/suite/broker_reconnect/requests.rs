//! Requests that are pending while the broker restarts.

use super::*;

#[test]
fn waiting_get_is_repeated_after_restart() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let getting = ask(&client, move |client| client.get(&Get::new("a").version(3).wait(Duration::from_secs(1000))));
    let (Message::Get(before), _) = peer.next() else { panic!() };
    assert_eq!(before.wait_ms, Some(1_000_000));
    thread::sleep(Duration::from_millis(30));
    drop(peer);
    let peer = broker.greet(FIRST);
    let (Message::Get(after), _) = peer.next() else { panic!() };
    assert_eq!(after.objects, before.objects);
    assert!(after.wait_ms.unwrap() <= 1_000_000 - 30, "{:?}", after.wait_ms);
    peer.refuse(RefusalCode::Timeout);
    assert_eq!(refused(getting.join().unwrap()).0, RefusalCode::Timeout);
    assert_eq!(client.peer().pid as u32, std::process::id());
}

#[test]
fn request_is_repeated_after_orderly_stop() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let listing = ask(&client, move |client| client.list("x"));
    let (list, _) = peer.next();
    let message = "the broker stops".to_owned();
    peer.say(&Message::Error(Failure { code: ErrorCode::Interrupted, message }));
    let peer = broker.greet(FIRST);
    assert_eq!(peer.next().0, list);
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert!(listing.join().unwrap().unwrap().is_empty());
    // Any other error fails the request.
    let getting = ask(&client, move |client| client.get_or_claim(&Get::new("a"), &ClaimOf::whole()));
    peer.next();
    peer.say(&Message::Error(Failure { code: ErrorCode::Protocol, message: "no".to_owned() }));
    let error = getting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Reported { code: ErrorCode::Protocol, .. })), "{error:?}");
}

#[test]
fn repeated_requests_keep_their_identifier() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let subject = Subject::host();
    let memory = filled(&subject.driver, 2 * MIB, Some(MIB), 7);
    let putting = ask(&client, move |client| client.put(&weights(&memory)));
    let (before, fds) = peer.put();
    assert!(before.request.is_some() && before.restore.is_none());
    let count = fds.len();
    // The broker publishes the version, and dies before it answers.
    drop((peer, fds));
    let peer = broker.greet(FIRST);
    let (after, fds) = peer.put();
    assert_eq!((&after, fds.len()), (&before, count));
    peer.published(OTHER);
    assert_eq!(putting.join().unwrap().unwrap().id, OTHER);

    let deleting = ask(&client, move |client| client.delete("a"));
    let (Message::Delete(before), _) = peer.next() else { panic!() };
    assert!(before.request.is_some());
    drop(peer);
    let peer = broker.greet(FIRST);
    // Only the broker knows whether the name's lifetime depends on its maker.
    assert_eq!(peer.resume().puts, [after.request.unwrap()]);
    peer.resumed(FIRST, &[]);
    assert_eq!(peer.next().0, Message::Delete(before.clone()));
    peer.say(&Message::Done(Done {}));
    deleting.join().unwrap().unwrap();

    let deleting = ask(&client, move |client| client.delete("a"));
    let (Message::Delete(next), _) = peer.next() else { panic!() };
    assert_ne!(next.request, before.request, "another request has another name");
    peer.refuse(RefusalCode::Absent);
    assert_eq!(refused(deleting.join().unwrap()).0, RefusalCode::Absent);
}

#[test]
fn request_beside_wait_keeps_its_limit() {
    let broker = Scripted::new();
    let (client, peer) = broker.client_with(Config::default().timeout(A_WHILE));
    let waiting = ask(&client, |client| client.get(&Get::new("a").wait(PATIENCE)));
    let Message::Get(before) = peer.next().0 else { panic!() };
    // The broker does not end the wait.
    let error = client.list("").unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Timeout { waited: A_WHILE, .. })), "{error:?}");
    assert_eq!(peer.next().0, Message::Stop(Stop {}));
    peer.refuse(RefusalCode::Stopped);
    let again = loop {
        match peer.next().0 {
            Message::Stop(_) => {}
            Message::Get(again) => break again,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(again.objects, before.objects);
    assert!(again.wait_ms.unwrap() <= before.wait_ms.unwrap() - A_WHILE.as_millis() as u64, "{again:?}");
    peer.refuse(RefusalCode::Absent);
    assert_eq!(refused(waiting.join().unwrap()).0, RefusalCode::Absent);
}

#[test]
fn put_of_several_records_starts_again() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let subject = Subject::host();
    let memory = filled(&subject.driver, MIB, None, 7);
    let putting = ask(&client, move |client| {
        let (_, chunks) = memory.chunks(0..MIB).unwrap().unwrap();
        let segments = std::iter::repeat_n((chunks[0].size(), chunks[0].as_fd()), 600);
        let mut memory = memory.describe().unwrap();
        memory.mapped_size *= 600;
        memory.sharing = vmmfd::memory::Sharing::Vmm { placement: memory.placement(), segments: 600 };
        let part = PutPart::of_segments("all", Backend::Host, memory, segments).unwrap();
        client.put(&Put::new("a").part(part))
    });
    let (before, _) = peer.put();
    peer.say(&Message::Send(Send {}));
    let (Message::Segments(segments), _) = peer.next() else { panic!() };
    assert_eq!(segments.first, before.sizes.len() as u64);
    drop(peer);
    let peer = broker.greet(FIRST);
    let (after, _) = peer.put();
    assert_eq!(after, before);
    peer.say(&Message::Send(Send {}));
    let mut came = after.sizes.len();
    while came < 600 {
        let (Message::Segments(Segments { first, sizes }), fds) = peer.next() else { panic!() };
        assert_eq!((first, fds.len()), (came as u64, sizes.len()));
        came += sizes.len();
    }
    drop(peer);
    // The third broker reports that the version was published.
    let peer = broker.greet(FIRST);
    assert_eq!(peer.put().0, before);
    peer.published(OTHER);
    assert_eq!(putting.join().unwrap().unwrap().id, OTHER);
}

#[test]
fn request_that_breaks_connections_ends() {
    let broker = Scripted::new();
    let (client, peer) = broker.client_with(Config::default().timeout(A_WHILE));
    let listing = ask(&client, move |client| client.list(""));
    let mut peer = Some(peer);
    let serving = meanwhile(move || {
        let mut times = 0;
        while let Some(at) = peer.take() {
            let (message, _) = at.next();
            if matches!(message, Message::Delete(_)) {
                at.say(&Message::Done(Done {}));
                return times;
            }
            times += 1;
            drop(at);
            peer = Some(broker.greet(FIRST));
        }
        times
    });
    let error = listing.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Gone { .. })), "{error:?}");
    // The client remains usable.
    client.delete("a").unwrap();
    assert!(serving.join().unwrap() > 1);
}

#[test]
fn stop_ends_a_wait_without_broker() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let getting = ask(&client, move |client| client.get(&Get::new("a").wait(Duration::from_secs(1000))));
    peer.next();
    drop(peer);
    // The client has reconnected, and waits for a hello.
    let peer = broker.accept();
    client.stop().unwrap();
    assert!(matches!(peer.next(), (Message::Hello(_), _)));
    peer.say(&Raw::hello());
    peer.next();
    peer.resumed(FIRST, &[]);
    assert!(matches!(peer.next(), (Message::Get(_), _)));
    assert!(matches!(peer.next(), (Message::Stop(_), _)));
    peer.refuse(RefusalCode::Stopped);
    assert_eq!(refused(getting.join().unwrap()).0, RefusalCode::Stopped);
}

#[test]
fn stop_never_reaches_the_next_request() {
    let broker = Scripted::new();
    let (client, peer) = broker.client_with(Config::default().timeout(10 * PATIENCE));
    let getting = ask(&client, move |client| client.get(&Get::new("a").wait(Duration::from_secs(1000))));
    assert!(matches!(peer.next(), (Message::Get(_), _)));
    let (stopped, stops) = mpsc::channel();
    let stopping = ask(&client, move |client| while stopped.send(client.stop()).is_ok() {});
    // The last one finds no room in the socket.
    while let Ok(sent) = stops.recv_timeout(A_WHILE) {
        sent.unwrap();
    }
    peer.refuse(RefusalCode::Stopped);
    assert_eq!(refused(getting.join().unwrap()).0, RefusalCode::Stopped);
    stops.recv_timeout(PATIENCE).expect("there is no request to stop").unwrap();
    drop(stops);
    stopping.join().unwrap();
    let listing = ask(&client, |client| client.list("").and(client.delete("a")));
    while matches!(peer.next(), (Message::Stop(_), _)) {}
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert!(matches!(peer.next(), (Message::Delete(_), _)));
    peer.say(&Message::Done(Done {}));
    listing.join().unwrap().unwrap();
}

#[test]
fn connect_waits_a_second_unless_asked() {
    let broker = Scripted::new();
    let path = broker.path();
    let folder = broker.end();
    let (second, short) = (Duration::from_secs(1), Duration::from_millis(50));
    let config = Config::default().timeout(10 * PATIENCE);
    for (config, wait) in [
        (config.clone(), second),
        (Config::default().timeout(short), short),
        (config.clone().wait(short), short),
        (config.clone().wait(Duration::ZERO), Duration::ZERO),
    ] {
        let error = Client::connect(&path, &config).unwrap_err();
        let Error::Socket(SocketError::NoBroker { waited, .. }) = error else { panic!("{error:?}") };
        assert_eq!(waited, wait);
        assert_eq!(error.to_string().contains(" within "), !wait.is_zero(), "{error}");
    }
    let connecting = thread::spawn(move || Client::connect(&path, &config.wait(PATIENCE)).map(drop));
    thread::sleep(second + short);
    let _peer = Scripted::again(folder).greet(FIRST);
    connecting.join().unwrap().unwrap();
}

#[test]
fn client_over_given_socket_never_reconnects() {
    let (ours, theirs) = vmmfd::channel::Channel::socket_pair().unwrap();
    let peer = Peer(Raw(theirs.into()));
    let greeting = meanwhile(move || {
        peer.next();
        peer.say(&Raw::hello());
        peer.next();
        peer.resumed(FIRST, &[]);
        drop(peer);
    });
    let client = Client::over(ours, &Config::default()).unwrap();
    greeting.join().unwrap();
    let error = client.list("").unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Gone { .. })), "{error:?}");
}

#[test]
fn check_cannot_request_on_its_connection() {
    let broker = Scripted::new();
    let (tell, told) = mpsc::channel();
    let client: Arc<Mutex<Option<Client>>> = Arc::default();
    let of_check = Arc::clone(&client);
    let cancel = Cancel::new().unwrap().with_check(move || {
        if let Some(client) = of_check.lock().unwrap().take() {
            tell.send(client.list("")).unwrap();
        }
        false
    });
    let (asking, peer) = broker.client_with(Config::default().timeout(PATIENCE).cancel(&cancel));
    client.lock().unwrap().replace(asking.clone());
    let listing = ask(&asking, |client| client.list(""));
    assert!(matches!(told.recv_timeout(A_WHILE).unwrap(), Err(Error::Misuse { .. })));
    assert!(matches!(peer.next().0, Message::List(_)));
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    listing.join().unwrap().unwrap();
    // Outside of the check, the same thread may ask again.
    let listing = ask(&asking, |client| client.list("").and(client.list("")));
    for _ in 0..2 {
        assert!(matches!(peer.next().0, Message::List(_)));
        peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    }
    listing.join().unwrap().unwrap();
}
