//! Topics: the broker introduces publishers and followers, and its death interrupts no stream.

use vmmfd::{
    error::{ErrorCode, RefusalCode},
    session::stream::{Policy, PublishOptions, Publisher, SubscribeOptions},
    topic::{self, Change, Follower, Topics, Update},
    wire::broker::{Follow, HeldTopic, Message, Met, OpenTopic},
};

use crate::support::{prelude::*, served::Keeper};

/// The limit of waits that end earlier.
const LIMIT: Duration = Duration::from_secs(60);

/// A limit that a test waits for.
const SHORT: Duration = Duration::from_millis(50);

fn publisher(subject: &Subject) -> Publisher {
    let options = PublishOptions::fixed(16, 8).history(1).every(LIMIT);
    Publisher::create(&subject.device(), &options, &Config::default().timeout(LIMIT)).unwrap()
}

fn publish(publisher: &Publisher, byte: u8) {
    let loan = publisher.loan(LIMIT).unwrap();
    loan.copy_in(0, &[byte; 16]).unwrap();
    loan.publish(&[byte]).unwrap();
}

fn follow(client: &Client, topics: Topics<'_>, subject: &Subject) -> Follower {
    let options = SubscribeOptions::default().history(1).policy(Policy::Queue(4));
    Follower::new(client, topics, &subject.driver, None, &options, &Config::default().timeout(LIMIT)).unwrap()
}

/// The next update: its topic and what happened, with the user byte of a sample whose bytes all have this value.
fn next(follower: &Follower) -> (String, String) {
    let Update { topic, change, .. } = follower.receive(LIMIT).unwrap();
    let what = match change {
        Change::Sample(sample) => {
            let mut bytes = [0; 16];
            sample.copy_out(0, &mut bytes).unwrap();
            assert_eq!(bytes, [sample.user()[0]; 16]);
            sample.user()[0].to_string()
        }
        Change::Joined => "joined".to_owned(),
        Change::Reset => "reset".to_owned(),
        Change::Ended => "ended".to_owned(),
        Change::Crashed(peer) => {
            assert_eq!(peer.pid, process::id() as i32);
            "crashed".to_owned()
        }
        other => format!("{other:?}"),
    };
    (topic.to_string(), what)
}

#[track_caller]
fn expect(follower: &Follower, topic: &str, what: &str) {
    assert_eq!(next(follower), (topic.to_owned(), what.to_owned()));
}

fn refused<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> RefusalCode {
    match result {
        Err(Error::Broker(refusal)) => refusal.code,
        other => panic!("{other:?}"),
    }
}

fn listed(client: &Client) -> Vec<HeldTopic> {
    client.who("").unwrap().topics
}

#[test]
fn followers_meet_publishers_now_and_later() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let client = served.client();
    let left = publisher(&subject);
    topic::open(&client, "camera/left", &left, None).unwrap();
    publish(&left, 1);
    let all = follow(&client, Topics::Prefix("camera/"), &subject);
    expect(&all, "camera/left", "joined");
    expect(&all, "camera/left", "1");
    let one = follow(&client, Topics::Named("camera/right"), &subject);
    assert!(one.try_receive().unwrap().is_none() && one.topics().is_empty());
    let timeout = one.receive(SHORT).unwrap_err();
    assert!(matches!(timeout, Error::Peer(PeerError::Timeout { .. })), "{timeout:?}");
    let right = publisher(&subject);
    assert_eq!(refused(topic::open(&client, "camera/left", &right, None)), RefusalCode::Exists);
    topic::open(&client, "camera/right", &right, None).unwrap();
    expect(&one, "camera/right", "joined");
    expect(&all, "camera/right", "joined");
    publish(&right, 2);
    expect(&one, "camera/right", "2");
    expect(&all, "camera/right", "2");
    let topics = listed(&client);
    let seen = topics.iter().map(|topic| (topic.name.as_str(), topic.pid, topic.epoch, topic.followers));
    let own = process::id() as i32;
    let expected = [("camera/left", own, left.epoch(), 1), ("camera/right", own, right.epoch(), 2)];
    assert_eq!(seen.collect::<Vec<_>>(), expected);
    // An end, and another publisher of the topic.
    right.finish(LIMIT).unwrap();
    expect(&one, "camera/right", "ended");
    expect(&all, "camera/right", "ended");
    let next = publisher(&subject);
    topic::open(&client, "camera/right", &next, None).unwrap();
    expect(&one, "camera/right", "reset");
    publish(&next, 3);
    expect(&one, "camera/right", "3");
    drop(next);
    expect(&one, "camera/right", "crashed");
    drop((all, one, left));
    served.wait_for_others(&client, 0);
    assert_eq!(listed(&client), []);
}

#[test]
fn streams_survive_the_broker() {
    let (served, subject) = (Served::start(Keeper::Apart, &Subject::host()), Subject::host());
    let client = served.client();
    let publisher = publisher(&subject);
    topic::open(&client, "camera", &publisher, None).unwrap();
    let before = follow(&client, Topics::Named("camera"), &subject);
    expect(&before, "camera", "joined");
    for byte in 1..=3 {
        served.kill_server();
        publish(&publisher, byte);
        expect(&before, "camera", &byte.to_string());
    }
    // A new one waits for the successor, and the publisher comes back to it.
    let after = follow(&client, Topics::Named("camera"), &subject);
    expect(&after, "camera", "joined");
    expect(&after, "camera", "3");
    publish(&publisher, 4);
    expect(&before, "camera", "4");
    expect(&after, "camera", "4");
    assert!(before.try_receive().unwrap().is_none(), "it is introduced again, and joins once");
}

#[test]
fn refusals_and_rights() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let client = served.client();
    let own = publisher(&subject);
    assert_eq!(refused(topic::open(&client, "a//b", &own, None)), RefusalCode::Invalid);
    assert_eq!(refused(topic::open(&client, "a", &own, Some(0o700))), RefusalCode::Invalid);
    let named = Topics::Named("a/");
    let result = Follower::new(&client, named, &subject.driver, None, &SubscribeOptions::default(), &Config::default());
    assert_eq!(refused(result), RefusalCode::Invalid);
    let none = SubscribeOptions::default().held(0);
    let result = Follower::new(&client, Topics::Prefix(""), &subject.driver, None, &none, &Config::default());
    assert!(matches!(result, Err(Error::Misuse { .. })));
}

#[test]
fn full_publishers_are_joined_later() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let publisher = publisher(&subject);
    topic::open(&served.client(), "small", &publisher, None).unwrap();
    let short = Config::default().timeout(SHORT);
    let follow = || loop {
        let client = Client::connect(&served.path, &short);
        let options = SubscribeOptions::default().held(4);
        let config = Config::default().timeout(LIMIT);
        // The time limit decides when it tries again. On a busy machine, it may be too short to connect.
        match client
            .and_then(|client| Follower::new(&client, Topics::Named("small"), &subject.driver, None, &options, &config))
        {
            Ok(follower) => return follower,
            Err(Error::Peer(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let first = follow();
    expect(&first, "small", "joined");
    // The pool has too few buffers for a second.
    let second = follow();
    match second.receive(LIMIT).unwrap().change {
        Change::Failed(Error::Peer(PeerError::Reported { code: ErrorCode::Full, .. })) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(second.receive(3 * SHORT), Err(Error::Peer(PeerError::Timeout { .. }))), "reported again");
    drop(first);
    expect(&second, "small", "joined");
}

/// A connection that opens or follows a topic by hand.
fn by_hand(served: &Served, message: &Message) -> Raw {
    let raw = served.greeted().0;
    assert_eq!(raw.answer(message), Message::Opened(vmmfd::wire::broker::Opened {}));
    raw
}

#[test]
fn a_stopped_publisher_holds_one_introduction() {
    let served = Served::alone(&[]);
    let open = |name: &str| Message::OpenTopic(OpenTopic { name: name.to_owned(), epoch: 7, mode: None });
    let stopped = by_hand(&served, &open("a"));
    let other = by_hand(&served, &open("b"));
    let follow = || by_hand(&served, &Message::Follow(Follow { name: String::new(), prefix: true }));
    let followers: Vec<Raw> = (0..20).map(|_| follow()).collect();
    // Each meets the one that answers. The first meets the stopped one too.
    let mut met = 0;
    let begun = Instant::now();
    while met < 20 {
        assert!(begun.elapsed() < LIMIT);
        let (Some((Message::Meet(meet), fds)), "b") = (other.receive().unwrap(), "b") else { panic!() };
        assert_eq!((meet.name.as_str(), meet.epoch, meet.pid, fds.len()), ("b", 7, process::id() as i32, 2));
        other.send(&Message::Met(Met {}), &[]).unwrap();
        met += 1;
        for follower in &followers {
            while follower.has_answer_within(0) {
                assert!(matches!(follower.receive().unwrap(), Some((Message::Meet(_), _))));
                follower.send(&Message::Met(Met {}), &[]).unwrap();
            }
        }
    }
    assert!(stopped.has_answer_within(0));
    assert!(matches!(stopped.receive().unwrap(), Some((Message::Meet(_), _))));
    assert!(!stopped.has_answer_within(50), "it has not taken the first");
    // What only clients of a topic may send, and what they may not.
    stopped.send(&Message::Met(Met {}), &[]).unwrap();
    assert!(matches!(stopped.receive().unwrap(), Some((Message::Meet(_), _))));
    stopped.send(&Message::Met(Met {}), &[]).unwrap();
    stopped.send(&open("c"), &[]).unwrap();
    let ending = stopped.ending().expect("an error");
    assert_eq!(ending.code, ErrorCode::Protocol);
    let idle = served.greeted().0;
    idle.send(&Message::Met(Met {}), &[]).unwrap();
    assert_eq!(idle.ending().expect("an error").code, ErrorCode::Protocol);
}

/// Clients that close at the moment of their introduction stop nobody.
#[test]
fn dead_clients_stop_no_topic() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let client = served.client();
    let publisher = publisher(&subject);
    topic::open(&client, "a", &publisher, None).unwrap();
    let follow_a = Message::Follow(Follow { name: "a".to_owned(), prefix: false });
    let open_a = Message::OpenTopic(OpenTopic { name: "b".to_owned(), epoch: 7, mode: None });
    let waiting = follow(&client, Topics::Named("b"), &subject);
    for _ in 0..20 {
        // The broker reads the request and the close at once.
        let raws: Vec<Raw> = [&follow_a, &open_a]
            .map(|message| {
                let raw = served.greeted().0;
                served.while_stopped(|| {
                    raw.send(message, &[]).unwrap();
                    let _ = raw.0.shutdown(std::net::Shutdown::Both);
                });
                raw
            })
            .into();
        drop(raws);
    }
    let follower = follow(&client, Topics::Named("a"), &subject);
    expect(&follower, "a", "joined");
    let begun = Instant::now();
    while let Err(error) = topic::open(&client, "b", &publisher, None) {
        assert!(begun.elapsed() < LIMIT, "{error}");
    }
    // The dead publishers may have failed.
    while next(&waiting).1 != "joined" {}
}

/// One publisher has two topics. Each ends once.
#[test]
fn topics_of_one_publisher_end_one_by_one() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let client = served.client();
    let publisher = publisher(&subject);
    ["a", "b"].iter().for_each(|name| topic::open(&client, name, &publisher, None).unwrap());
    let follower = follow(&client, Topics::Prefix(""), &subject);
    let mut seen: Vec<_> = (0..2).map(|_| next(&follower)).collect();
    publish(&publisher, 1);
    drop(publisher);
    seen.extend((0..4).map(|_| next(&follower)));
    seen.sort();
    let expected = ["a 1", "a crashed", "a joined", "b 1", "b crashed", "b joined"];
    assert_eq!(seen.iter().map(|(topic, what)| format!("{topic} {what}")).collect::<Vec<_>>(), expected);
    assert!(follower.try_receive().unwrap().is_none() && follower.topics().is_empty());
}

#[test]
fn descriptors_of_followers_show_updates() {
    let (served, subject) = (Served::alone(&[]), Subject::host());
    let client = served.client();
    let follower = follow(&client, Topics::Prefix(""), &subject);
    let readable = || {
        let mut fds = [nix::poll::PollFd::new(follower.as_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, 60_000u16).unwrap() == 1
    };
    let publisher = publisher(&subject);
    topic::open(&client, "a", &publisher, None).unwrap();
    assert!(readable());
    expect(&follower, "a", "joined");
    publish(&publisher, 1);
    assert!(readable());
    expect(&follower, "a", "1");
    assert!(follower.try_receive().unwrap().is_none());
}
