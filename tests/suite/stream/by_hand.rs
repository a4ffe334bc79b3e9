//! Publisher and subscriber against a scripted peer.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    both_ends_synchronize_before_sending,
    received_descriptor_is_imported_at_once,
    unopened_memory_is_not_acknowledged,
    other_clients_do_not_delay_subscribers,
    lying_consumer_ends_the_session,
    lying_producer_ends_the_session,
    busy_does_not_extend_half_sent_buffer,
    flood_of_busy_delays_no_nonblocking_call,
    ]
}

fn both_ends_synchronize_before_sending(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut channel) = place.by_hand(&subject);
    let (id, memory) = buffers(&subject, &mut publisher, 1).remove(0);
    assert!(matches!(answer(&mut channel).0, Message::Offer(_)), "it is described when it is entered");
    subject.faulty.take_verbs();
    let at_arrival = thread::scope(|scope| {
        let published = scope.spawn(|| publisher.publish(id).unwrap());
        let (Message::Ready(ready), fds) = answer(&mut channel) else { panic!() };
        let verbs = subject.faulty.take_verbs();
        assert_eq!((ready.sizes.len(), fds.len()), (1, 1));
        channel.send(&Message::Received(wire::Received { segments: 1 }), &[]).unwrap();
        published.join().unwrap();
        verbs
    });
    assert_eq!(at_arrival, ["synchronize"]);
    channel.send(&Message::Done(BufferTurn { buffer: id.number(), generation: 1 }), &[]).unwrap();
    publisher.take_back().unwrap();
    publisher.publish(id).unwrap();
    let (ready, fds) = answer(&mut channel);
    assert_eq!(ready, Message::Ready(Ready { buffer: id.number(), generation: 2, sizes: Vec::new() }));
    assert!(fds.is_empty(), "no descriptor comes again");
    assert_eq!(subject.faulty.take_verbs(), ["synchronize"]);
    drop((publisher, channel, memory));

    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    let received = hand_over(&mut publisher, &mut subscriber, id);
    subject.faulty.take_verbs();
    thread::scope(|scope| {
        let back = scope.spawn(|| {
            publisher.take_back().unwrap();
            subject.faulty.take_verbs()
        });
        subscriber.give_back(received).unwrap();
        assert_eq!(back.join().unwrap().first(), Some(&"synchronize"));
    });
}

fn received_descriptor_is_imported_at_once(subject: Subject) {
    let mut liar = Liar::new(&subject);
    let file = Inode::of(liar.memory.chunks(0..1).unwrap().unwrap().1.remove(0).as_fd());
    let open = file.open_here();
    subject.faulty.take_verbs();
    let received = liar.lend();
    let mut verbs = subject.faulty.take_verbs();
    // The first import looks for the right device, if there are several.
    verbs.retain(|verb| !verb.starts_with("device_") && !["activate", "granularity"].contains(verb));
    assert_eq!(verbs, ["import", "properties", "reserve", "map", "set_access"]);
    liar.subscriber.give_back(received).unwrap();
    assert_eq!(subject.faulty.take_verbs(), ["synchronize", "release"]);
    if subject.kind != Kind::Cuda {
        assert_eq!(file.open_here(), open, "the descriptor is closed too");
    }
}

fn unopened_memory_is_not_acknowledged(subject: Subject) {
    for verb in ["reserve", "import", "map", "set_access"] {
        let mut liar = Liar::new(&subject);
        liar.begin();
        subject.faulty.fail(Fault::Verb(verb), 4242);
        assert!(matches!(liar.subscriber.receive(), Err(Error::Driver { code: 4242, .. })));
        subject.faulty.mend();
        assert_eq!((told(&mut liar.channel), liar.subscriber.held()), (ErrorCode::Failed, 0));
        refused(liar.subscriber.try_receive(), "the session has ended");
    }
}

fn other_clients_do_not_delay_subscribers(subject: Subject) {
    let place = Place::new();
    // Silent connections, and a closed connection.
    let silent: Vec<Channel> = (0..100).map(|_| dial(&place.path())).collect();
    drop(dial(&place.path()));
    let say = |messages: &[Message]| {
        let mut channel = dial(&place.path());
        messages.iter().for_each(|message| channel.send(message, &[]).unwrap());
        channel
    };
    let own = subject.driver.backend().to_string();
    let subscribe = |keep| Message::Subscribe(Subscribe { keep });
    let refused = [
        (say(&[greeting(&subject), request("default", None)]), ErrorCode::Object),
        (say(&[subscribe(1)]), ErrorCode::Protocol),
        (say(&[greeting(&subject), subscribe(0)]), ErrorCode::Protocol),
        (say(&[greeting(&subject), greeting(&subject)]), ErrorCode::Protocol),
        (say(&[hello("hip", &["stream"]), subscribe(1)]), ErrorCode::Backend),
        (say(&[hello(&own, &["streams", ""]), subscribe(1)]), ErrorCode::Protocol),
    ];
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    turn(&mut publisher, &mut subscriber, id);
    for (mut channel, code) in refused {
        let told = std::iter::from_fn(|| Some(answer(&mut channel).0)).find(|told| !matches!(told, Message::Hello(_)));
        assert!(matches!(&told, Some(Message::Error(failure)) if failure.code == code), "{told:?}");
    }
    drop(silent);
}

/// Messages that a consumer may not send at this time.
fn lying_consumer_ends_the_session(subject: Subject) {
    let place = Place::new();
    let turn = |buffer, generation| BufferTurn { buffer, generation };
    let gone = |buffer| Message::Gone(BufferNumber { buffer });
    // Of two buffers the first is out for the second time, and the second was never published.
    let lies = [
        Message::Done(turn(0, 1)),
        Message::Done(turn(0, 3)),
        Message::Done(turn(9, 1)),
        gone(0),
        gone(1),
        Message::Subscribe(Subscribe { keep: 1 }),
        Message::Received(wire::Received { segments: 1 }),
        Message::Withdraw(BufferNumber { buffer: 0 }),
        greeting(&subject),
    ];
    for lie in lies {
        for new in [false, true] {
            // While a new buffer is being sent, `received` is the expected message.
            if new && matches!(lie, Message::Received(_)) {
                continue;
            }
            let (mut publisher, mut channel) = place.by_hand(&subject);
            let buffers = buffers(&subject, &mut publisher, 2);
            (0..2).for_each(|_| drop(answer(&mut channel)));
            thread::scope(|scope| {
                let published = scope.spawn(|| publisher.publish(buffers[0].0).unwrap());
                drop(answer(&mut channel));
                channel.send(&Message::Received(wire::Received { segments: 1 }), &[]).unwrap();
                published.join().unwrap();
            });
            channel.send(&Message::Done(turn(0, 1)), &[]).unwrap();
            publisher.take_back().unwrap();
            publisher.publish(buffers[0].0).unwrap();
            answer(&mut channel);
            channel.send(&lie, &[]).unwrap();
            let ended = if new { publisher.publish(buffers[1].0).map(drop) } else { publisher.take_back().map(drop) };
            assert!(matches!(ended, Err(Error::Peer(PeerError::Protocol(_)))), "{lie:?} {ended:?}");
            refused(publisher.take_back(), "the session has ended");
            if new {
                drop(answer(&mut channel));
            }
            assert_eq!(told(&mut channel), ErrorCode::Protocol, "{lie:?}");
        }
    }
    // The number of segments is wrong.
    for segments in [0, 2, u64::MAX] {
        let (mut publisher, mut channel) = place.by_hand(&subject);
        let id = buffers(&subject, &mut publisher, 1)[0].0;
        channel.send(&Message::Received(wire::Received { segments }), &[]).unwrap();
        assert!(matches!(publisher.publish(id), Err(Error::Peer(PeerError::Protocol(_)))));
    }
    // Waits for a silent peer are limited.
    let place = Place::with_timeout(Duration::from_millis(500));
    let (mut publisher, _silent) = place.by_hand(&subject);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    assert!(matches!(publisher.publish(id), Err(Error::Peer(PeerError::Timeout { .. }))));
    refused(publisher.publish(id), "the session has ended");
}

fn lying_producer_ends_the_session(subject: Subject) {
    let turn = |buffer, generation| Message::Ready(Ready { buffer, generation, sizes: Vec::new() });
    let withdraw = |buffer| Message::Withdraw(BufferNumber { buffer });
    // A buffer that is open and not in use.
    let subscribe = Message::Subscribe(Subscribe { keep: 1 });
    for lie in [
        turn(4, 1),
        turn(4, 3),
        turn(5, 1),
        withdraw(5),
        Message::Gone(BufferNumber { buffer: 4 }),
        subscribe,
        greeting(&subject),
    ] {
        let mut liar = Liar::new(&subject);
        let received = liar.lend();
        liar.subscriber.give_back(received).unwrap();
        liar.channel.send(&lie, &[]).unwrap();
        liar.found_out(&format!("{lie:?}"));
    }
    // A buffer that is in use.
    for lies in [&[turn(4, 2)][..], &[withdraw(4), withdraw(4)], &[withdraw(4), turn(4, 2)]] {
        let mut liar = Liar::new(&subject);
        let _received = liar.lend();
        lies.iter().for_each(|lie| liar.channel.send(lie, &[]).unwrap());
        liar.found_out(&format!("{lies:?}"));
    }
    let mut liar = Liar::new(&subject);
    let mut offer = liar.offer.clone();
    // The object has two segments, but the offered part has one.
    offer.memory.mapped_size *= 2;
    offer.memory.segments = 2;
    liar.offer(&offer);
    liar.ready(1);
    liar.found_out("a part of it");
    // Another message in place of the next segments.
    for follower in [turn(4, 2), withdraw(4), Message::Received(wire::Received { segments: 0 })] {
        let mut liar = Liar::of_two(&subject, PATIENCE);
        liar.begin();
        liar.channel.send(&follower, &[]).unwrap();
        liar.found_out(&format!("{follower:?} where segments belong"));
    }
    // A producer that exits between segments.
    let mut liar = Liar::of_two(&subject, PATIENCE);
    liar.begin();
    let Liar { channel, mut subscriber, .. } = liar;
    drop(channel);
    assert!(matches!(subscriber.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    assert_eq!(subscriber.held(), 0);
}

fn busy_does_not_extend_half_sent_buffer(subject: Subject) {
    let timeout = moment(&subject, 500);
    let mut liar = Liar::of_two(&subject, timeout);
    liar.begin();
    let Liar { mut channel, mut subscriber, .. } = liar;
    let received = thread::scope(|scope| {
        scope.spawn(move || {
            // Eight times the subscriber's limit. After that the producer would be gone.
            for _ in 0..40 {
                let Ok(()) = channel.send(&Message::Busy(Busy {}), &[]) else { break };
                thread::sleep(timeout / 5);
            }
        });
        subscriber.try_receive()
    });
    assert!(matches!(received, Err(Error::Peer(PeerError::Timeout { purpose: "for the memory", .. }))), "{received:?}");
}

fn flood_of_busy_delays_no_nonblocking_call(subject: Subject) {
    /// More than one call may read.
    fn flood(channel: &mut Channel) {
        nix::sys::socket::setsockopt(channel, nix::sys::socket::sockopt::SndBuf, &212_992).unwrap();
        (0..400).for_each(|_| channel.send(&Message::Busy(Busy {}), &[]).unwrap());
    }
    let has_more = |fd: BorrowedFd<'_>| {
        let mut fds = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, nix::poll::PollTimeout::ZERO).unwrap() > 0
    };
    let Liar { mut channel, mut subscriber, .. } = Liar::new(&subject);
    flood(&mut channel);
    let (mut publisher, mut consumer) = Place::new().by_hand(&subject);
    flood(&mut consumer);
    for more in [true, false] {
        assert!(subscriber.try_receive().unwrap().is_none());
        assert_eq!(has_more(subscriber.as_fd()), more);
        assert!(publisher.try_take_back().unwrap().is_none());
        assert_eq!(has_more(publisher.as_fd()), more);
    }
}
