//! `vmmfd conform` against this crate's own peers, which follow every rule, and against handwritten peers that break one rule.
//!
//! One file of more than 500 lines: the handwritten peers and the rules that they break.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use nix::{
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::Signal,
    },
    unistd::ftruncate,
};
use rustix::net::{SocketAddrUnix, connect};
use serde_json::Value;
use vmmfd::{
    Error,
    channel::{Cancel, Channel, Listener},
    driver::{Access, Backend, Choice, Driver, GRANULARITY, open},
    error::PeerError,
    memory::{Device, Selector, Shared, Spec},
    session::{
        Config, Verdict,
        stream::{Publisher, Subscriber},
    },
    wire::{Busy, ErrorCode, Failure, Hello, Message, Offer, Ready, Received, Segments, Subscribe},
};

use crate::{
    conversation::{PATIENCE, accepted, hello, listening, seqpacket},
    running::{Ended, Meeting, Run},
};

fn conform(meeting: &Meeting, role: &str, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.arg("conform").arg(meeting.socket()).args(["--as", role, "--json"]).args(options);
    run
}

/// Asserts that every case is `kept` except `left_out`.
#[track_caller]
pub(crate) fn conforms(ended: &Ended, left_out: &[&str]) {
    let report = ended.code(0).json();
    assert_eq!((&report["conforms"], &report["schema"]), (&Value::Bool(true), &1.into()));
    let cases = report["cases"].as_array().unwrap();
    let found: Vec<&Value> = cases.iter().filter(|case| case["outcome"] != "kept").map(|case| &case["name"]).collect();
    assert_eq!(found, left_out, "{report}");
    assert!(cases.len() > 10);
}

/// Asserts that the report has exactly one broken rule.
#[track_caller]
pub(crate) fn breaks(ended: &Ended, rule: &str, found: &str) {
    let report = ended.code(1).json();
    assert_eq!(report["conforms"], false);
    let broken = report["broken"].as_array().unwrap();
    assert_eq!((broken.len(), broken[0]["rule"].as_str()), (1, Some(rule)), "{report}");
    assert!(broken[0]["found"].as_str().unwrap().contains(found), "{report}");
    // The rule's sentence from the documentation.
    assert!(broken[0]["text"].as_str().unwrap().len() > 20, "{report}");
}

fn driver() -> Driver {
    open(Choice::Only(Backend::Host)).unwrap().driver
}

#[test]
fn this_producer_conforms() {
    let meeting = Meeting::host();
    let options = ["--consumers", "0", "--size", "9MiB", "--chunk", "2MiB", "--timeout", "1s"];
    let no_reply: &[&str] = &["round-trip-without-check"];
    for (more, left_out) in [(&[][..], no_reply), (&["--round-trip"], &[]), (&["--seal"], no_reply)] {
        let producer = meeting.listening(&[&options, more].concat());
        conforms(&conform(&meeting, "consumer", &[]).end(), left_out);
        producer.signal(Signal::SIGTERM);
        producer.end();
    }
}

#[test]
fn these_consumers_conform() {
    for (options, left_out) in [
        (&["--timeout", "1s"][..], &["other-access"][..]),
        (&["--timeout", "1s", "--access", "ro"], &["round-trip", "immutable-to-be-written"]),
    ] {
        let meeting = Meeting::host();
        let through = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !through.load(Ordering::Relaxed) {
                    meeting.consumer(options).end();
                }
            });
            let ended = conform(&meeting, "producer", &[]).end();
            through.store(true, Ordering::Relaxed);
            conforms(&ended, left_out);
        });
    }
}

#[test]
fn this_publisher_conforms() {
    let meeting = Meeting::host();
    let (path, through) = (meeting.socket(), AtomicBool::new(false));
    let listener = Listener::bind(&path, false, Duration::from_secs(1), &Cancel::new().unwrap()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| publish(&listener, &through));
        let ended = conform(&meeting, "subscriber", &[]).end();
        through.store(true, Ordering::Relaxed);
        conforms(&ended, &[]);
    });
}

/// Serves subscribers one at a time, with three buffers in rotation.
fn publish(listener: &Listener, through: &AtomicBool) {
    let (driver, config) = (driver(), Config::default().timeout(Duration::from_secs(2)));
    let device = Device::find(&driver, Selector::default()).unwrap();
    let serve = || -> vmmfd::Result<()> {
        let mut publisher = Publisher::accept(listener, &driver, &config)?;
        let mut ids = Vec::new();
        for size in [100, 3 * GRANULARITY, 5] {
            let shared = Arc::new(Shared::create(&device, Spec::vmm(size).chunk(GRANULARITY))?);
            ids.push(publisher.add(&shared, None, Access::ReadOnly)?);
        }
        for turn in 0.. {
            publisher.publish(ids[turn % 3])?;
            publisher.take_back()?;
            if turn == 4 {
                publisher.withdraw(ids.remove(0))?;
                let shared = Arc::new(Shared::create(&device, Spec::vmm(7))?);
                ids.push(publisher.add(&shared, None, Access::ReadOnly)?);
            }
        }
        Ok(())
    };
    while !through.load(Ordering::Relaxed) {
        // A failed subscriber must not stop the publisher.
        let _ = serve();
    }
}

#[test]
fn this_subscriber_conforms() {
    let meeting = Meeting::host();
    let through = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (driver, config) = (driver(), Config::default().timeout(Duration::from_secs(2)));
            let subscribe = || -> vmmfd::Result<()> {
                let mut subscriber = Subscriber::connect(&driver, None, &meeting.socket(), 2, &config)?;
                loop {
                    match subscriber.receive() {
                        // The subscriber waits through silence.
                        Err(Error::Peer(PeerError::Timeout { .. })) => {}
                        received => subscriber.give_back(received?)?,
                    }
                }
            };
            while !through.load(Ordering::Relaxed) {
                let _ = subscribe();
            }
        });
        let ended = conform(&meeting, "publisher", &[]).end();
        through.store(true, Ordering::Relaxed);
        conforms(&ended, &[]);
    });
}

#[test]
fn missing_peer_finds_nothing() {
    let meeting = Meeting::host();
    for role in ["consumer", "producer", "publisher", "subscriber"] {
        let report = conform(&meeting, role, &["--wait", "50ms"]).end().code(4).json();
        assert_eq!((&report["conforms"], &report["cases"][0]["outcome"]), (&Value::Null, &"not_met".into()));
        assert!(report["incomplete"].as_str().unwrap().starts_with("0 of "), "{report}");
    }
    // This producer serves a single consumer.
    let producer = meeting.listening(&["--size", "4"]);
    let report = conform(&meeting, "consumer", &["--wait", "50ms"]).end().code(4).json();
    assert_eq!(report["cases"][0]["outcome"], "kept", "{report}");
    producer.end().code(0);
}

#[test]
fn contradictory_options_are_bad_usage() {
    let meeting = Meeting::host();
    conform(&meeting, "consumer", &["--only", "nonsense"]).end().code(2).says("no case called `nonsense`");
    let ended = conform(&meeting, "broker", &[]).end();
    let report = ended.code(2).json();
    let message = report["error"]["message"].as_str().unwrap();
    assert!(message.contains("[possible values: consumer, producer, subscriber, publisher, client]"), "{message}");
    let listed = {
        let mut run = meeting.bare("vmmfd");
        run.command.args(["conform", "--as", "publisher", "--list"]);
        run.end()
    };
    assert!(listed.code(0).stdout.contains("beyond-keep"), "{}", listed.stdout);
}

#[test]
fn text_quotes_the_rule() {
    let meeting = Meeting::host();
    let listener = listening(&meeting.socket(), 1);
    thread::scope(|scope| {
        // The tool connects twice: after the first failure, the peer may only have stopped listening.
        scope.spawn(|| (0..2).for_each(|_| drop(accepted(&listener))));
        let mut run = meeting.bare("vmmfd");
        run.command.arg("conform").arg(meeting.socket()).args(["--as", "consumer", "--only", "handoff"]);
        let ended = run.end();
        let text = &ended.code(1).stdout;
        assert!(
            text.contains("BROKEN") && text.contains("H2: closed the connection without an error instead of hello"),
            "{text}"
        );
        assert!(text.contains("\nrule H2: The consumer sends `hello` first"), "{text}");
        assert!(text.contains("DOES NOT CONFORM: 0 cases passed, 1 failed, 0 left out"), "{text}");
    });
}

/// Retries until the tool listens.
fn connected(path: &PathBuf) -> Channel {
    loop {
        let socket = seqpacket();
        if connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_ok() {
            return Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// `None` after a close and for an invalid record.
fn heard(channel: &mut Channel) -> Option<(Message, Vec<OwnedFd>)> {
    channel.receive("for a test").ok()
}

fn say(channel: &mut Channel, message: &Message) {
    // The tool may already have closed the connection.
    let _ = channel.send(message, &[]);
}

fn error(code: ErrorCode) -> Message {
    Message::Error(Failure { code, message: "by hand".to_owned() })
}

/// Runs the tool as a consumer in one case, against a handwritten producer.
fn against_producer(case: &str, produce: impl FnOnce(&mut Channel) + Send) -> Ended {
    let meeting = Meeting::host();
    let listener = listening(&meeting.socket(), 1);
    thread::scope(|scope| {
        scope.spawn(|| produce(&mut accepted(&listener)));
        conform(&meeting, "consumer", &["--only", case, "--timeout", "3s"]).end()
    })
}

/// Runs the tool as a producer or publisher in one case, against a handwritten consumer.
fn against_consumer(role: &str, case: &str, consume: impl FnOnce(&mut Channel) + Send) -> Ended {
    let meeting = Meeting::host();
    thread::scope(|scope| {
        let path = meeting.socket();
        scope.spawn(move || consume(&mut connected(&path)));
        conform(&meeting, role, &["--only", case, "--timeout", "3s"]).end()
    })
}

fn greet(channel: &mut Channel) {
    heard(channel);
    say(channel, &hello(Backend::Host));
}

/// A valid offer, with its descriptor.
fn offered() -> (Offer, OwnedFd) {
    let driver = driver();
    let shared = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(100)).unwrap();
    let (part, chunks) = shared.chunks(0..100).unwrap().unwrap();
    let offer = Offer {
        object: "default".into(),
        memory: (&shared.describe().unwrap()).into(),
        array: None,
        access: Access::ReadOnly,
        part: Some(part.into()),
        check: None,
        buffer: None,
    };
    (offer, chunks[0].as_fd().try_clone_to_owned().unwrap())
}

/// Answers a request with a changed offer, and with `fd` or a valid descriptor.
fn offer(channel: &mut Channel, change: fn(&mut Offer), fd: Option<OwnedFd>) {
    greet(channel);
    heard(channel);
    let (mut offer, sound) = offered();
    change(&mut offer);
    say(channel, &Message::Offer(Box::new(offer)));
    let segments = Message::Segments(Segments { first: 0, sizes: vec![GRANULARITY] });
    let _ = channel.send(&segments, &[fd.unwrap_or(sound).as_fd()]);
    heard(channel);
}

fn memfd(committed: u64, size: u64, seals: SealFlag) -> OwnedFd {
    let memfd = memfd_create(c"peer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&memfd, size as i64).unwrap();
    fallocate(&memfd, FallocateFlags::empty(), 0, committed as i64).unwrap();
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    memfd
}

#[test]
fn faulty_producer_is_detected() {
    let whole = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    breaks(
        &against_producer("handoff", |channel| say(channel, &Message::Busy(Busy {}))),
        "H2",
        "sent busy instead of hello",
    );
    breaks(
        &against_producer("handoff", |channel| {
            greet(channel);
            heard(channel);
            // Sends no answer and no `busy`.
            heard(channel);
        }),
        "H3",
        "sent neither offer nor `busy` for 3s",
    );
    let other: fn(&mut Offer) = |offer| offer.object = "another".into();
    breaks(&against_producer("handoff", move |channel| offer(channel, other, None)), "C4", "offered object `another`");
    let no_part: fn(&mut Offer) = |offer| offer.part = None;
    // The offer lacks the feature under test, so the case has no outcome.
    let left_out = against_producer("handoff", move |channel| offer(channel, no_part, None)).code(4).json();
    assert_eq!((&left_out["conforms"], &left_out["cases"][0]["outcome"]), (&Value::Null, &"left_out".into()));
    let short: fn(&mut Offer) = |offer| offer.part.as_mut().unwrap().segments = 2;
    breaks(&against_producer("handoff", move |channel| offer(channel, short, None)), "C5", "2 segments from segment 0");
    let pool: fn(&mut Offer) = |offer| offer.memory.pool = Some(1);
    breaks(&against_producer("handoff", move |channel| offer(channel, pool, None)), "M2", "has a pool");
    let odd: fn(&mut Offer) = |offer| offer.memory.mapped_size += 1;
    breaks(&against_producer("handoff", move |channel| offer(channel, odd, None)), "M1", "bytes of memory");
    for (fd, rule, found) in [
        (File::open("/dev/null").unwrap().into(), "V1", "not a memfd"),
        (memfd(GRANULARITY, 2 * GRANULARITY, whole), "V1", "4194304 bytes, declared as 2097152"),
        (memfd(GRANULARITY, GRANULARITY, SealFlag::F_SEAL_SEAL), "V2", "with the seals"),
        (memfd(4096, GRANULARITY, whole), "V3", "committed 4096 of 2097152 bytes"),
    ] {
        breaks(&against_producer("handoff", |channel| offer(channel, |_| {}, Some(fd))), rule, found);
    }
    let immutable: fn(&mut Offer) = |offer| offer.memory.immutable = true;
    breaks(&against_producer("handoff", move |channel| offer(channel, immutable, None)), "V4", "as immutable");
    // Wrong error code, silence, and a message after the error.
    breaks(
        &against_producer("empty-range", |channel| {
            greet(channel);
            heard(channel);
            say(channel, &error(ErrorCode::Failed));
        }),
        "C3",
        "expected error `range`, but got `failed`",
    );
    breaks(
        &against_producer("record: 4.0", |channel| {
            greet(channel);
            heard(channel);
        }),
        "R7",
        "expected error `protocol`, but the peer closed the connection",
    );
    breaks(
        &against_producer("record: 4.0", |channel| {
            greet(channel);
            heard(channel);
            say(channel, &error(ErrorCode::Protocol));
            say(channel, &Message::Busy(Busy {}));
        }),
        "H5",
        "sent busy after its error",
    );
    breaks(
        &against_producer("mismatch", |channel| {
            offer(channel, |_| {}, None);
            heard(channel);
            say(channel, &Message::Result(Verdict::unchecked(true)));
        }),
        "C11",
        "verified: true although the consumer reported a mismatch",
    );
}

#[test]
fn forbidden_answer_is_detected() {
    let one = |channel: &mut Channel| {
        offer(channel, |_| {}, None);
        heard(channel);
        say(channel, &Message::Result(Verdict::unchecked(true)));
        heard(channel);
    };
    // A wait that `busy` prolongs, and a subscription that gets the error of a first message.
    breaks(
        &against_producer("busy-between-requests", |channel| {
            one(channel);
            heard(channel);
        }),
        "H4",
        "expected error `protocol`",
    );
    breaks(
        &against_producer("subscribe-between-requests", |channel| {
            one(channel);
            say(channel, &error(ErrorCode::Object));
        }),
        "C13",
        "expected error `protocol`, but got `object`",
    );
    breaks(
        &against_producer("record: an error without a code", |channel| {
            greet(channel);
            heard(channel);
            say(channel, &error(ErrorCode::Protocol));
        }),
        "H5",
        "sent error after an error that can't be decoded",
    );
    breaks(
        &against_producer("round-trip-without-check", |channel| {
            let round_trip: fn(&mut Offer) = |offer| {
                offer.access = Access::ReadWrite;
                offer.check = serde_json::from_str(r#"{"salt":1,"reply_salt":2}"#).ok();
            };
            offer(channel, round_trip, None);
            heard(channel);
            say(channel, &Message::Result(Verdict::unchecked(false)));
        }),
        "C11",
        "answered verified: false and a check although no reply was written",
    );
    // A consumer that verifies the pattern and ignores the rest of the check.
    for (case, rule) in [("salt-and-digest", "K1"), ("reply-salt-without-salt", "K1"), ("salt-twice", "R8")] {
        let checks = |channel: &mut Channel| {
            say(channel, &hello(Backend::Host));
            heard(channel);
            say(channel, &crate::conversation::request("default", None));
            while let Ok((message, fds)) = channel.receive("for a test") {
                if let Message::Segments(_) = message {
                    say(channel, &Message::Received(Received { segments: fds.len() as u64 }));
                    let check = serde_json::from_str(r#"{"words":524287,"mismatches":0}"#).ok();
                    let mut verdict = Verdict::unchecked(true);
                    verdict.check = check;
                    say(channel, &Message::Result(verdict));
                }
            }
        };
        let found = if rule == "R8" {
            "but the peer closed the connection"
        } else {
            "expected error `protocol`, but got result"
        };
        breaks(&against_consumer("producer", case, checks), rule, found);
    }
}

/// A consumer that accepts every message.
fn believe(channel: &mut Channel) {
    say(channel, &hello(Backend::Host));
    heard(channel);
    say(channel, &crate::conversation::request("default", None));
    let mut segments = 0;
    while let Some((message, fds)) = heard(channel) {
        segments += fds.len() as u64;
        if let Message::Segments(_) = message {
            say(channel, &Message::Received(Received { segments }));
            say(channel, &Message::Result(Verdict::unchecked(true)));
        }
    }
}

#[test]
fn faulty_consumer_is_detected() {
    for (case, rule) in [
        ("memory-that-can-shrink", "V2"),
        ("seals-not-final", "V2"),
        ("sparse-memory", "V3"),
        ("shorter-memory", "V1"),
        ("no-memory", "V1"),
        ("immutable-unsealed", "V4"),
        ("more-than-comes", "V1"),
        ("far-more-than-there-is", "C9"),
        ("all-bytes-in-the-first-of-two-segments", "C5"),
        ("segment-before-the-first-byte", "C5"),
        ("more-than-there-can-be", "M1"),
        ("other-backend", "C2"),
        ("wrong-order", "C6"),
    ] {
        breaks(&against_consumer("producer", case, believe), rule, "expected error");
    }
    // The channel rejects these records and closes the connection without an error.
    for (case, rule) in [("array-for-a-part", "R4"), ("uuid-with-a-prefix", "M4"), ("record: a name twice", "R8")] {
        breaks(&against_consumer("producer", case, believe), rule, "but the peer closed the connection");
    }
    breaks(
        &against_consumer("producer", "one-allocation", |channel| {
            say(channel, &hello(Backend::Host));
            say(channel, &Message::Busy(Busy {}));
            while heard(channel).is_some() {}
        }),
        "H4",
        "sent busy before its first request",
    );
    breaks(
        &against_consumer("producer", "three-allocations", |channel| {
            say(channel, &hello(Backend::Host));
            heard(channel);
            say(channel, &crate::conversation::request("default", None));
            heard(channel);
            heard(channel);
            say(channel, &Message::Received(Received { segments: 3 }));
            while heard(channel).is_some() {}
        }),
        "C7",
        "acknowledged 3 segments instead of 1",
    );
}

fn greeting() -> Message {
    let Message::Hello(greeting) = hello(Backend::Host) else { panic!() };
    Message::Hello(Hello { capabilities: vec!["stream".to_owned()], ..greeting })
}

#[test]
fn faulty_subscriber_is_detected() {
    let subscribe = |channel: &mut Channel, keep| {
        say(channel, &greeting());
        heard(channel);
        say(channel, &Message::Subscribe(Subscribe { keep }));
    };
    // Opens every buffer, and returns each immediately.
    let believe = move |channel: &mut Channel| {
        subscribe(channel, 1);
        let mut open = Vec::new();
        while let Some((message, _)) = heard(channel) {
            let Message::Ready(Ready { buffer, generation, sizes }) = message else { continue };
            if !sizes.is_empty() {
                say(channel, &Message::Received(Received { segments: sizes.len() as u64 }));
                open.push(buffer);
            }
            say(channel, &Message::Done(vmmfd::wire::BufferTurn { buffer, generation }));
        }
    };
    for (case, rule, found) in [
        ("beyond-keep", "S10", "opened more than 1 buffers"),
        ("turns", "S12", "neither gone nor `busy`"),
        ("generation-left-out", "S5", "expected error `protocol`"),
        ("undescribed", "S2", "expected error `protocol`"),
        ("open-with-segments", "S6", "expected error `protocol`"),
        ("too-many-buffers", "S4", "but nothing arrived"),
        ("withdraw-of-nothing", "S12", "but nothing arrived"),
        ("sparse-memory", "V3", "expected error `protocol`"),
    ] {
        // Silence in place of an answer breaks the rule on silence.
        let rule = if case == "turns" { "H3" } else { rule };
        breaks(&against_consumer("publisher", case, believe), rule, found);
    }
    let silent = |channel: &mut Channel| while heard(channel).is_some() {};
    breaks(
        &against_consumer("publisher", "turns", move |channel| {
            say(channel, &hello(Backend::Host));
            silent(channel);
        }),
        "S1",
        "without the capability",
    );
}

#[test]
fn faulty_publisher_is_detected() {
    type Publish = fn(&mut Channel, &Offer, &OwnedFd);
    let ready = |channel: &mut Channel, generation, sizes: &[u64], fd: &OwnedFd| {
        let fds = vec![fd.as_fd(); sizes.len()];
        let _ = channel.send(&Message::Ready(Ready { buffer: 3, generation, sizes: sizes.to_vec() }), &fds);
    };
    let cases: [(&str, &str, Publish); 6] = [
        ("S2", "without a number", |channel, offer, _| {
            say(channel, &Message::Offer(Box::new(Offer { buffer: None, ..offer.clone() })));
        }),
        ("S2", "used the buffer number 3 twice", |channel, offer, _| {
            (0..2).for_each(|_| say(channel, &Message::Offer(Box::new(offer.clone()))));
        }),
        ("S3", "as object `x`", |channel, offer, _| {
            say(channel, &Message::Offer(Box::new(Offer { object: "x".into(), ..offer.clone() })));
        }),
        ("S5", "generation 2 of buffer 3 instead of 1", |channel, offer, fd| {
            say(channel, &Message::Offer(Box::new(offer.clone())));
            let ready = Ready { buffer: 3, generation: 2, sizes: vec![GRANULARITY] };
            let _ = channel.send(&Message::Ready(ready), &[fd.as_fd()]);
        }),
        ("S7", "published a closed buffer with 0 segments", |channel, offer, _| {
            say(channel, &Message::Offer(Box::new(offer.clone())));
            say(channel, &Message::Ready(Ready { buffer: 3, generation: 1, sizes: Vec::new() }));
        }),
        ("R2", "sent received in a stream", |channel, _, _| say(channel, &Message::Received(Received { segments: 0 }))),
    ];
    let serve = |publish: &(dyn Fn(&mut Channel, &Offer, &OwnedFd) + Sync)| {
        let meeting = Meeting::host();
        let listener = listening(&meeting.socket(), 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut channel = accepted(&listener);
                heard(&mut channel);
                say(&mut channel, &greeting());
                heard(&mut channel);
                let (offer, fd) = offered();
                publish(&mut channel, &Offer { buffer: Some(3), ..offer }, &fd);
                while heard(&mut channel).is_some() {}
            });
            conform(&meeting, "subscriber", &["--only", "turns", "--timeout", "3s"]).end()
        })
    };
    for (rule, found, publish) in cases {
        breaks(&serve(&publish), rule, found);
    }
    let again = serve(&|channel, offer, fd| {
        say(channel, &Message::Offer(Box::new(offer.clone())));
        ready(channel, 1, &[GRANULARITY], fd);
        heard(channel);
        heard(channel);
        ready(channel, 2, &[GRANULARITY], fd);
    });
    breaks(&again, "S6", "sent 1 segments of an open buffer");
}
