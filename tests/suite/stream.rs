//! Buffers that come again and again over one connection, and each end of it against a peer that dies, dawdles or lies.

use std::{
    env,
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};
use sendfd::SendWithFd;
use tempfile::TempDir;
use vmmfd::{
    Error, Result,
    array::{ArrayDescriptor, ElementType, Order},
    channel::{Cancel, CancelReason, Channel, Listener},
    driver::{Access::ReadOnly, Access::ReadWrite, Backend},
    error::{MemoryError, PeerError},
    memory::{Device, Pool, Region, Shared, Spec},
    session::{
        Config, Verdict,
        handoff::{self, Buffer, Consumer, ServeOptions, Unchecked, serve},
        stream::{BufferId, Publisher, Received, Subscriber},
    },
    wire::{self, BufferNumber, BufferTurn, ErrorCode, Hello, MAX_FDS, Message, Offer, PoolNumber, Ready, Subscribe},
};

use crate::{
    conversation::{PATIENCE, answer, dial, request, seqpacket, told},
    support::{Fault, Inode, Kind, Subject, in_child},
};

cases! {
    on crate::support::Subject; every backend: [
    a_buffer_that_is_published_again_is_not_mapped_again,
    buffers_in_rotation_carry_every_generation_both_ways,
    several_may_be_in_use_at_once_and_come_back_in_any_order,
    buffers_of_many_segments_are_whole,
    the_least_recently_used_makes_room_and_is_offered_anew,
    what_is_in_use_is_not_let_go_of,
    where_all_is_in_use_nothing_is_taken_and_the_session_goes_on,
    what_is_withdrawn_is_let_go_of_at_once_or_when_it_is_given_back,
    a_buffer_that_was_dropped_is_given_back_with_the_next_call,
    a_producer_that_goes_leaves_nothing_open_but_what_is_in_use,
    a_consumer_that_goes_is_told_and_the_next_one_is_served,
    several_consumers_share_one_memory,
    a_producer_that_never_pauses_does_not_hold_whoever_waits,
    silence_changes_nothing,
    whoever_does_not_wait_is_told_that_there_is_nothing,
    what_makes_no_sense_is_refused_and_changes_nothing,
    both_ends_finish_their_work_before_they_send,
    work_that_fails_is_not_reported_as_done,
    nothing_stands_between_a_descriptor_and_its_memory,
    memory_that_can_not_be_opened_is_not_acknowledged,
    arrays_come_with_their_buffers_and_return_with_their_last_view,
    whoever_does_not_subscribe_is_refused_and_delays_nobody,
    a_producer_without_streams_is_told_apart,
    a_consumer_that_lies_ends_the_session,
    a_producer_that_lies_ends_the_session,
    a_turn_that_comes_with_a_descriptor_is_refused,
    a_failure_at_any_call_leaves_nothing,
    ]
    gpus alone: [
    buffers_of_a_pool_share_it,
    a_pool_comes_again_after_a_withdrawal_that_took_long,
    a_producer_waits_until_what_is_borrowed_is_closed,
    memory_that_is_borrowed_and_not_closed_stays_allocated,
    legacy_memory_is_streamed_to_another_process,
    ]
}

/// A place to meet.
struct Place {
    folder: TempDir,
    listener: Listener,
    config: Config,
    /// Ends the waits of both ends.
    cancel: Cancel,
}

impl Place {
    fn new() -> Self {
        Self::with_timeout(PATIENCE)
    }

    fn with_timeout(timeout: Duration) -> Self {
        let (folder, cancel) = (tempfile::tempdir().unwrap(), Cancel::new().unwrap());
        let config = Config::default().timeout(timeout).cancel(&cancel);
        let listener = Listener::bind(&folder.path().join("s"), false, PATIENCE, &Cancel::new().unwrap()).unwrap();
        Self { folder, listener, config, cancel }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn subscribe(&self, subject: &Subject, keep: usize) -> Result<Subscriber> {
        Subscriber::connect(&subject.driver, None, &self.path(), keep, &self.config)
    }

    fn accept(&self, subject: &Subject) -> Result<Publisher> {
        Publisher::accept(&self.listener, &subject.driver, &self.config)
    }

    /// Both ends of a stream.
    fn meet(&self, subject: &Subject, keep: usize) -> (Publisher, Subscriber) {
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| self.subscribe(subject, keep));
            (self.accept(subject).unwrap(), subscriber.join().unwrap().unwrap())
        })
    }

    /// A publisher, and its consumer made by hand.
    fn by_hand(&self, subject: &Subject) -> (Publisher, Channel) {
        let mut channel = dial(&self.path());
        channel.send(&greeting(subject), &[]).unwrap();
        channel.send(&Message::Subscribe(Subscribe { keep: 3 }), &[]).unwrap();
        let publisher = self.accept(subject).unwrap();
        let (Message::Hello(theirs), _) = answer(&mut channel) else { panic!() };
        assert_eq!(theirs.capabilities, ["stream"]);
        (publisher, channel)
    }
}

/// A timeout that a test waits for: a GPU that other tests use too may take a while to do anything.
fn moment(subject: &Subject, milliseconds: u64) -> Duration {
    Duration::from_millis(if subject.kind == Kind::Cuda { milliseconds + 2000 } else { milliseconds })
}

fn backend(subject: &Subject) -> Backend {
    subject.driver.backend()
}

fn greeting(subject: &Subject) -> Message {
    let capabilities = vec![wire::STREAM.to_owned()];
    Message::Hello(Hello {
        version: 1,
        capabilities,
        backend: backend(subject).to_string(),
        pid: 1,
        timeout_ms: 20_000,
    })
}

fn memory(subject: &Subject, size: u64) -> Arc<Shared> {
    Arc::new(Shared::create(&subject.device(), Spec::vmm(size)).unwrap())
}

/// So many buffers of a publisher, with their memory.
fn buffers(subject: &Subject, publisher: &mut Publisher, count: usize) -> Vec<(BufferId, Arc<Shared>)> {
    let mut add = |memory| (publisher.add(&memory, None, ReadWrite).unwrap(), memory);
    (0..count).map(|_| add(memory(subject, 100))).collect()
}

/// Publishes at one end and receives at the other.
#[track_caller]
fn hand_over(publisher: &mut Publisher, subscriber: &mut Subscriber, id: BufferId) -> Received {
    let (published, received) = thread::scope(|scope| {
        let published = scope.spawn(|| publisher.publish(id));
        let received = subscriber.receive();
        (published.join().unwrap(), received)
    });
    let received = received.unwrap();
    assert_eq!((published.unwrap(), id.number()), (received.generation(), received.id().number()));
    received
}

/// One turn of a buffer, from end to end.
#[track_caller]
fn turn(publisher: &mut Publisher, subscriber: &mut Subscriber, id: BufferId) {
    let received = hand_over(publisher, subscriber, id);
    subscriber.give_back(received).unwrap();
    assert_eq!(publisher.take_back().unwrap(), id);
}

/// What a consumer does that waits for nothing but the end of its buffers, until so many are left.
#[track_caller]
fn until_held(subscriber: &mut Subscriber, count: usize) {
    let begun = Instant::now();
    while subscriber.held() > count {
        assert!(subscriber.try_receive().unwrap().is_none() && begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(1));
    }
}

fn read<const LENGTH: usize>(region: &dyn Region, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0xEE; LENGTH];
    region.copy_out(offset, &mut bytes).unwrap();
    bytes
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, why: &str) {
    match result {
        Err(Error::Misuse { problem }) if problem.contains(why) => {}
        other => panic!("{other:?} where `{why}` belongs"),
    }
}

fn a_buffer_that_is_published_again_is_not_mapped_again(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let (id, memory) = buffers(&subject, &mut publisher, 1).remove(0);
    let before = subject.live();
    let first = hand_over(&mut publisher, &mut subscriber, id);
    let (address, mapped_size) = (first.address(), memory.mapped_size());
    assert_eq!((first.size(), first.mapped_size(), first.access()), (100, mapped_size, ReadWrite));
    assert_eq!(first.array(), None);
    assert_eq!((subject.live().mappings, subscriber.held()), (before.mappings + 1, 1));
    subscriber.give_back(first).unwrap();
    assert_eq!(publisher.take_back().unwrap(), id);
    // Neither handle nor descriptor is left of what came.
    assert_eq!(subject.live().handles, before.handles);
    let live = subject.live();
    subject.faulty.take_verbs();
    for generation in 2..6 {
        assert_eq!(publisher.publish(id).unwrap(), generation, "nobody need be there to answer");
        let received = subscriber.receive().unwrap();
        assert_eq!((received.generation(), received.address()), (generation, address));
        assert!(publisher.is_out(id));
        subscriber.give_back(received).unwrap();
        assert_eq!(publisher.take_back().unwrap(), id);
        assert!(!publisher.is_out(id));
        // One at each end, and nothing else of the driver's.
        assert_eq!(subject.faulty.take_verbs(), ["synchronize"; 2]);
    }
    assert_eq!(subject.live(), live);
}

fn buffers_in_rotation_carry_every_generation_both_ways(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 3);
    let buffers = buffers(&subject, &mut publisher, 3);
    const ROUNDS: u8 = 24;
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..ROUNDS {
                let received = subscriber.receive().unwrap();
                assert_eq!(received.generation(), u64::from(round) / 3 + 1);
                assert_eq!(read::<100>(&received, 0), [round; 100]);
                received.copy_in(50, &[!round; 50]).unwrap();
                subscriber.give_back(received).unwrap();
            }
        });
        for round in 0..ROUNDS {
            let (id, memory) = &buffers[usize::from(round) % 3];
            if round >= 3 {
                assert_eq!(publisher.take_back().unwrap(), *id, "in the order in which they were given back");
                assert_eq!(read::<50>(&**memory, 50), [!(round - 3); 50]);
            }
            memory.copy_in(0, &[round; 100]).unwrap();
            publisher.publish(*id).unwrap();
        }
        for round in ROUNDS - 3..ROUNDS {
            publisher.take_back().unwrap();
            assert_eq!(read::<50>(&*buffers[usize::from(round) % 3].1, 50), [!round; 50]);
        }
    });
}

fn several_may_be_in_use_at_once_and_come_back_in_any_order(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 3);
    let ids: Vec<BufferId> = buffers(&subject, &mut publisher, 3).iter().map(|(id, _)| *id).collect();
    for _ in 0..2 {
        let mut received: Vec<Received> =
            ids.iter().map(|id| hand_over(&mut publisher, &mut subscriber, *id)).collect();
        for index in [1, 1, 0] {
            subscriber.give_back(received.remove(index)).unwrap();
        }
        let back: Vec<BufferId> = (0..3).map(|_| publisher.take_back().unwrap()).collect();
        assert_eq!(back, [ids[1], ids[2], ids[0]]);
    }
}

fn buffers_of_many_segments_are_whole(subject: Subject) {
    let (place, unit) = (Place::new(), subject.unit());
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    // On a GPU that many would take long; more than one record all the same where it is cheap.
    let count = if subject.kind == Kind::Cuda { 5 } else { MAX_FDS as u64 + 2 };
    let spec = Spec::vmm(count * unit).chunk(unit);
    let memory = Arc::new(Shared::create(&subject.device(), spec).unwrap());
    let id = publisher.add(&memory, None, ReadOnly).unwrap();
    memory.copy_in((count - 1) * unit - 2, b"over").unwrap();
    subject.faulty.take_verbs();
    let received = hand_over(&mut publisher, &mut subscriber, id);
    let verbs = subject.faulty.take_verbs();
    let releases = |verbs: &[&str]| verbs.iter().filter(|verb| **verb == "release").count();
    let last = verbs.iter().rposition(|verb| *verb == "import").unwrap();
    // Those of one record at most are open at a time.
    let expected = if count > MAX_FDS as u64 { MAX_FDS } else { 0 };
    assert_eq!((releases(&verbs[..last]), releases(&verbs)), (expected, expected));
    assert_eq!((received.size(), read(&received, (count - 1) * unit - 2)), (count * unit, *b"over"));
    assert!(received.copy_in(0, b"x").is_err(), "it is read-only");
    subscriber.give_back(received).unwrap();
    publisher.take_back().unwrap();
}

fn the_least_recently_used_makes_room_and_is_offered_anew(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let ids: Vec<BufferId> = buffers(&subject, &mut publisher, 3).iter().map(|(id, _)| *id).collect();
    let own = subject.live().mappings;
    assert_eq!(publisher.keeps(), 2);
    let imports = |publisher: &mut Publisher, subscriber: &mut Subscriber, id| {
        subject.faulty.take_verbs();
        turn(publisher, subscriber, id);
        assert!(subscriber.held() <= 2 && subject.live().mappings - own == subscriber.held());
        let verbs = subject.faulty.take_verbs();
        let at = |verb| verbs.iter().position(|of| *of == verb);
        // The bound is strict: room is made before anything is opened.
        assert!(at("unmap").is_none_or(|unmap| unmap < at("import").unwrap()), "{verbs:?}");
        at("import").is_some()
    };
    let mut turns = Vec::new();
    for index in [0, 1, 0, 2, 0, 1, 2, 2, 1] {
        turns.push(imports(&mut publisher, &mut subscriber, ids[index]));
    }
    // 2 displaces 1, 1 displaces 2, 2 displaces 0.
    assert_eq!(turns, [true, true, false, true, false, true, true, false, false]);
}

fn what_is_in_use_is_not_let_go_of(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let buffers = buffers(&subject, &mut publisher, 3);
    let [a, b, c] = [0, 1, 2].map(|index| buffers[index].0);
    let in_use = hand_over(&mut publisher, &mut subscriber, a);
    turn(&mut publisher, &mut subscriber, b);
    // The one in use was used longer ago.
    turn(&mut publisher, &mut subscriber, c);
    buffers[0].1.copy_in(0, b"there").unwrap();
    assert_eq!(read(&in_use, 0), *b"there");
    subscriber.give_back(in_use).unwrap();
    assert_eq!(publisher.take_back().unwrap(), a);
    subject.faulty.take_verbs();
    turn(&mut publisher, &mut subscriber, a);
    assert!(!subject.faulty.take_verbs().contains(&"import"));
}

fn where_all_is_in_use_nothing_is_taken_and_the_session_goes_on(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    let ids: Vec<BufferId> = buffers(&subject, &mut publisher, 2).iter().map(|(id, _)| *id).collect();
    let first = hand_over(&mut publisher, &mut subscriber, ids[0]);
    thread::scope(|scope| {
        let published = scope.spawn(|| publisher.publish(ids[1]));
        for _ in 0..3 {
            refused(subscriber.receive(), "all 1 buffers that this subscriber keeps are in use: give one back first");
            refused(subscriber.try_receive(), "are in use");
        }
        assert_eq!(subscriber.held(), 1);
        subscriber.give_back(first).unwrap();
        let second = subscriber.receive().unwrap();
        assert_eq!((second.id().number(), published.join().unwrap().unwrap()), (ids[1].number(), 1));
        assert_eq!(subscriber.held(), 1);
    });
    assert_eq!(publisher.take_back().unwrap(), ids[0]);
    assert!(publisher.is_out(ids[1]));
}

fn what_is_withdrawn_is_let_go_of_at_once_or_when_it_is_given_back(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 4);
    let buffers = buffers(&subject, &mut publisher, 5);
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|index| buffers[index].0);
    let own = subject.live().mappings;
    turn(&mut publisher, &mut subscriber, a);
    let in_use = hand_over(&mut publisher, &mut subscriber, b);
    // Given back, and not yet asked for.
    let unasked = hand_over(&mut publisher, &mut subscriber, c);
    subscriber.give_back(unasked).unwrap();
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            // The consumer waits for a buffer all the while.
            assert_eq!(subscriber.receive().unwrap().id().number(), d.number());
            assert_eq!(subscriber.held(), 2);
            subscriber.give_back(in_use).unwrap();
            until_held(&mut subscriber, 1);
        });
        publisher.withdraw(a).unwrap();
        assert_eq!(subject.live().mappings, own + 2);
        publisher.withdraw(c).unwrap();
        assert_eq!(subject.live().mappings, own + 1);
        publisher.publish(d).unwrap();
        publisher.withdraw(b).unwrap();
        assert_eq!(subject.live().mappings, own + 1);
    });
    assert!(begun.elapsed() < PATIENCE / 2);
    for id in [a, b, c] {
        refused(publisher.publish(id), "there is no buffer");
        refused(publisher.withdraw(id), "there is no buffer");
    }
    // One that was dropped while this side waited for a buffer.
    let dropped = hand_over(&mut publisher, &mut subscriber, e);
    thread::scope(|scope| {
        let next = scope.spawn(|| subscriber.receive().unwrap().id());
        thread::sleep(Duration::from_millis(50));
        drop(dropped);
        publisher.withdraw(e).unwrap();
        // It gave the other one back before it waited.
        assert_eq!(publisher.take_back().unwrap(), d);
        publisher.publish(d).unwrap();
        assert_eq!(next.join().unwrap().number(), d.number());
    });
    // Of what was withdrawn nothing comes back; the last one was dropped.
    assert!(matches!(subscriber.try_receive(), Ok(None)));
    assert_eq!(publisher.take_back().unwrap(), d);
    let never_published = publisher.add(&buffers[0].1, None, ReadOnly).unwrap();
    assert!(never_published > e, "a number is not used again");
    publisher.withdraw(never_published).unwrap();
}

fn a_buffer_that_was_dropped_is_given_back_with_the_next_call(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    let ids: Vec<BufferId> = buffers(&subject, &mut publisher, 2).iter().map(|(id, _)| *id).collect();
    for id in [ids[0], ids[0], ids[1], ids[0]] {
        // The bound is one: without the return there would be no room.
        drop(hand_over(&mut publisher, &mut subscriber, id));
        assert!(publisher.is_out(id));
        assert!(publisher.try_take_back().unwrap().is_none(), "before the next call");
        assert!(subscriber.try_receive().unwrap().is_none());
        assert_eq!(publisher.take_back().unwrap(), id);
    }
}

fn a_producer_that_goes_leaves_nothing_open_but_what_is_in_use(subject: Subject) {
    let place = Place::new();
    for closed in [true, false] {
        let (mut publisher, mut subscriber) = place.meet(&subject, 4);
        let buffers = buffers(&subject, &mut publisher, 3);
        buffers[0].1.copy_in(0, b"still").unwrap();
        let in_use = hand_over(&mut publisher, &mut subscriber, buffers[0].0);
        turn(&mut publisher, &mut subscriber, buffers[1].0);
        drop(hand_over(&mut publisher, &mut subscriber, buffers[2].0));
        if closed {
            publisher.close();
        } else {
            // As a process does that is killed: with what was said to it unread.
            drop(publisher);
        }
        drop(buffers);
        let gone = subscriber.receive();
        assert!(matches!(gone, Err(Error::Peer(PeerError::Gone { .. }))), "{gone:?}");
        assert_eq!((subscriber.held(), subject.live().mappings), (0, 1));
        assert_eq!(read(&in_use, 0), *b"still", "what is in use stays");
        refused(subscriber.receive(), "the session has ended");
        refused(subscriber.give_back(in_use), "the session has ended");
        subject.assert_empty();
    }
}

fn a_consumer_that_goes_is_told_and_the_next_one_is_served(subject: Subject) {
    let place = Place::new();
    let memory = memory(&subject, 100);
    for closed in [true, false] {
        let own = subject.live();
        let (mut publisher, mut subscriber) = place.meet(&subject, 2);
        let id = publisher.add(&memory, None, ReadOnly).unwrap();
        let received = hand_over(&mut publisher, &mut subscriber, id);
        if closed {
            subscriber.close();
            drop(received);
        } else {
            drop((received, subscriber));
        }
        assert_eq!(subject.live(), own);
        let gone = publisher.take_back();
        assert!(matches!(gone, Err(Error::Peer(PeerError::Gone { .. }))), "{gone:?}");
        refused(publisher.take_back(), "the session has ended");
        refused(publisher.publish(id), "the session has ended");
        refused(publisher.withdraw(id), "the session has ended");
    }
    // Also where nothing is read before.
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = publisher.add(&memory, None, ReadOnly).unwrap();
    turn(&mut publisher, &mut subscriber, id);
    drop(subscriber);
    // A child of another test may have the socket for a moment, until it executes its program.
    let told = publisher.publish(id).and_then(|_| publisher.take_back());
    assert!(matches!(told, Err(Error::Peer(PeerError::Gone { .. }))), "{told:?}");
}

fn several_consumers_share_one_memory(subject: Subject) {
    let place = Place::new();
    let memory = memory(&subject, 100);
    let mut ends: Vec<(Publisher, Subscriber)> = (0..3).map(|_| place.meet(&subject, 1)).collect();
    let ids: Vec<BufferId> =
        ends.iter_mut().map(|(publisher, _)| publisher.add(&memory, None, ReadOnly).unwrap()).collect();
    for round in 0..3 {
        memory.copy_in(0, &[round; 9]).unwrap();
        let mut received = Vec::new();
        for ((publisher, subscriber), id) in ends.iter_mut().zip(&ids) {
            received.push(hand_over(publisher, subscriber, *id));
        }
        for ((publisher, subscriber), received) in ends.iter_mut().zip(received) {
            assert_eq!(read(&received, 0), [round; 9]);
            subscriber.give_back(received).unwrap();
            publisher.take_back().unwrap();
        }
    }
}

fn a_producer_that_never_pauses_does_not_hold_whoever_waits(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 2000));
    let (publisher, mut subscriber) = place.meet(&subject, 1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (stop, memory) = (&stop, memory(&subject, 1));
        scope.spawn(move || {
            let mut publisher = publisher;
            while !stop.load(Ordering::Relaxed) {
                let Ok(id) = publisher.add(&memory, None, ReadOnly) else { break };
                let Ok(()) = publisher.withdraw(id) else { break };
            }
        });
        for _ in 0..3 {
            let waited = subscriber.receive();
            assert!(
                matches!(waited, Err(Error::Peer(PeerError::Timeout { purpose: "for a buffer", .. }))),
                "{waited:?}"
            );
        }
        stop.store(true, Ordering::Relaxed);
        drop(subscriber);
    });
}

fn silence_changes_nothing(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 1500));
    assert!(matches!(place.accept(&subject), Err(Error::Peer(PeerError::NoConsumer { .. }))));
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    for generation in 1..3 {
        for _ in 0..2 {
            assert!(matches!(
                subscriber.receive(),
                Err(Error::Peer(PeerError::Timeout { purpose: "for a buffer", .. }))
            ));
            assert!(matches!(publisher.take_back(), Err(Error::Peer(PeerError::Timeout { .. }))));
        }
        let received = hand_over(&mut publisher, &mut subscriber, id);
        assert_eq!(received.generation(), generation);
        assert!(matches!(publisher.take_back(), Err(Error::Peer(PeerError::Timeout { .. }))));
        subscriber.give_back(received).unwrap();
        assert_eq!(publisher.take_back().unwrap(), id);
    }
    let received = hand_over(&mut publisher, &mut subscriber, id);
    for _ in 0..2 {
        assert!(matches!(publisher.withdraw(id), Err(Error::Peer(PeerError::Timeout { .. }))), "it is in use");
        refused(publisher.publish(id), "is being withdrawn");
    }
    assert!(subscriber.try_receive().unwrap().is_none());
    subscriber.give_back(received).unwrap();
    publisher.withdraw(id).unwrap();
    assert_eq!(subscriber.held(), 0);
}

fn whoever_does_not_wait_is_told_that_there_is_nothing(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    let readable = |fd: BorrowedFd<'_>| {
        let mut fds = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, nix::poll::PollTimeout::ZERO).unwrap() == 1
    };
    let begun = Instant::now();
    assert!(subscriber.try_receive().unwrap().is_none() && publisher.try_take_back().unwrap().is_none());
    turn(&mut publisher, &mut subscriber, id);
    assert!(!readable(subscriber.as_fd()) && !readable(publisher.as_fd()));
    publisher.publish(id).unwrap();
    assert!(readable(subscriber.as_fd()) && !readable(publisher.as_fd()));
    let received = subscriber.try_receive().unwrap().unwrap();
    subscriber.give_back(received).unwrap();
    assert!(!readable(subscriber.as_fd()) && readable(publisher.as_fd()));
    assert_eq!(publisher.try_take_back().unwrap(), Some(id));
    assert!(begun.elapsed() < PATIENCE / 2);
}

fn what_makes_no_sense_is_refused_and_changes_nothing(subject: Subject) {
    let place = Place::new();
    refused(place.subscribe(&subject, 0), "one buffer at least");
    let ((mut publisher, mut subscriber), (mut other_publisher, mut other)) =
        (place.meet(&subject, 2), place.meet(&subject, 2));
    let (id, memory) = buffers(&subject, &mut publisher, 1).remove(0);
    let ids = buffers(&subject, &mut publisher, 1);
    let (_, mut third) = place.meet(&subject, 1);
    let unknown = {
        let (mut publisher, _subscriber) = place.meet(&subject, 1);
        let mut all = buffers(&subject, &mut publisher, 3);
        all.remove(2).0
    };
    refused(publisher.publish(unknown), "buffer 2 is of another session");
    refused(publisher.withdraw(unknown), "buffer 2 is of another session");
    assert!(!publisher.is_out(unknown));
    // Of the same number as one of this session, which is not published in its place.
    let foreign = buffers(&subject, &mut other_publisher, 1)[0].0;
    assert!(foreign.number() == id.number() && foreign != id);
    refused(publisher.publish(foreign), "buffer 0 is of another session");
    refused(publisher.announce(foreign), "is of another session");
    refused(publisher.withdraw(foreign), "is of another session");
    assert!(subscriber.try_receive().unwrap().is_none());
    other_publisher.withdraw(foreign).unwrap();

    let received = hand_over(&mut publisher, &mut subscriber, id);
    refused(publisher.publish(id), "is out");
    // A buffer of the same number.
    let theirs = buffers(&subject, &mut other_publisher, 1)[0].0;
    let of_theirs = hand_over(&mut other_publisher, &mut other, theirs);
    assert_ne!(received.id(), of_theirs.id());
    refused(publisher.publish(received.id()), "is of another session");
    refused(other.give_back(received), "is not of this session");
    assert!(other_publisher.try_take_back().unwrap().is_none());
    other.give_back(of_theirs).unwrap();
    assert!(matches!(third.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    // It went back to its own session with that.
    assert!(subscriber.try_receive().unwrap().is_none());
    assert_eq!(publisher.take_back().unwrap(), id);
    turn(&mut publisher, &mut subscriber, ids[0].0);

    let array = ArrayDescriptor::new(ElementType::U8, [101], Order::C).unwrap();
    let added = publisher.add(&memory, Some(array), ReadOnly);
    assert!(matches!(added, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{added:?}");
    let sealed = Arc::new(Shared::create(&subject.device(), Spec::vmm(1).sealed()).unwrap());
    assert!(matches!(publisher.add(&sealed, None, ReadOnly), Err(Error::Misuse { .. })), "it is still to be sealed");
    sealed.seal().unwrap();
    refused(publisher.add(&sealed, None, ReadWrite), "read-only alone");
    let id = publisher.add(&sealed, None, ReadOnly).unwrap();
    turn(&mut publisher, &mut subscriber, id);
    if subject.kind != Kind::Host {
        let elsewhere = Subject::host();
        refused(publisher.add(&self::memory(&elsewhere, 1), None, ReadOnly), "can't have memory of another");
    }
}

fn both_ends_finish_their_work_before_they_send(subject: Subject) {
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

fn work_that_fails_is_not_reported_as_done(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    turn(&mut publisher, &mut subscriber, id);
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(publisher.publish(id), Err(Error::Driver { code: 4242, .. })));
    assert!(!publisher.is_out(id));
    subject.faulty.mend();
    assert!(subscriber.try_receive().unwrap().is_none(), "nothing was sent");
    assert_eq!(publisher.publish(id).unwrap(), 2, "nor counted");
    let received = subscriber.receive().unwrap();
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(subscriber.give_back(received), Err(Error::Driver { code: 4242, .. })));
    assert!(matches!(subscriber.receive(), Err(Error::Driver { code: 4242, .. })), "it is tried again");
    assert!(publisher.try_take_back().unwrap().is_none());
    subject.faulty.mend();
    assert!(subscriber.try_receive().unwrap().is_none());
    assert_eq!(publisher.take_back().unwrap(), id);
    turn(&mut publisher, &mut subscriber, id);
}

fn nothing_stands_between_a_descriptor_and_its_memory(subject: Subject) {
    let mut liar = Liar::new(&subject);
    let file = Inode::of(liar.memory.chunks(0..1).unwrap().unwrap().1.remove(0).as_fd());
    let open = file.open_here();
    subject.faulty.take_verbs();
    let received = liar.lend();
    let mut verbs = subject.faulty.take_verbs();
    // Where there are several devices the right one is looked for, the first time.
    verbs.retain(|verb| !verb.starts_with("device_") && !["activate", "granularity"].contains(verb));
    assert_eq!(verbs, ["import", "properties", "reserve", "map", "set_access"]);
    liar.subscriber.give_back(received).unwrap();
    assert_eq!(subject.faulty.take_verbs(), ["synchronize", "release"]);
    if subject.kind != Kind::Cuda {
        assert_eq!(file.open_here(), open, "the descriptor is closed too");
    }
}

fn memory_that_can_not_be_opened_is_not_acknowledged(subject: Subject) {
    for verb in ["reserve", "import", "map", "set_access"] {
        let mut liar = Liar::new(&subject);
        let offer = liar.offer.clone();
        liar.offer(&offer);
        liar.ready(1);
        subject.faulty.fail(Fault::Verb(verb), 4242);
        assert!(matches!(liar.subscriber.receive(), Err(Error::Driver { code: 4242, .. })));
        subject.faulty.mend();
        assert_eq!((told(&mut liar.channel), liar.subscriber.held()), (ErrorCode::Failed, 0));
        refused(liar.subscriber.try_receive(), "the session has ended");
    }
    // Nor where a single buffer was asked for.
    let Place { folder, listener, config, .. } = Place::new();
    let path = folder.path().join("s");
    let shared = Shared::create(&subject.device(), Spec::vmm(10)).unwrap();
    let buffer = Buffer::new(shared, Unchecked, None).unwrap();
    let served = thread::scope(|scope| {
        let producer = scope.spawn(|| serve(listener, &buffer, &ServeOptions::default(), &config, &|_| {}));
        let mut consumer = Consumer::connect(&subject.driver, None, &path, &config, &|_| {}).unwrap();
        subject.faulty.fail(Fault::Verb("set_access"), 4242);
        assert!(matches!(consumer.request(&handoff::Request::default()), Err(Error::Driver { code: 4242, .. })));
        subject.faulty.mend();
        drop(consumer);
        producer.join().unwrap().into_result().unwrap()
    });
    let error = served[0].error.as_ref().unwrap();
    let purpose = "for the descriptors to be acknowledged";
    assert!(matches!(error, Error::Peer(PeerError::Gone { purpose: of }) if *of == purpose), "{error}");
}

fn arrays_come_with_their_buffers_and_return_with_their_last_view(subject: Subject) {
    let place = Place::new();
    let (mut publisher, mut subscriber) = place.meet(&subject, 1);
    let array = ArrayDescriptor::new(ElementType::U8, [5, 20], Order::C).unwrap();
    let memory = memory(&subject, 100);
    let id = publisher.add(&memory, Some(array.clone()), ReadOnly).unwrap();
    memory.copy_in(40, &[7; 20]).unwrap();
    for _ in 0..2 {
        let received = hand_over(&mut publisher, &mut subscriber, id);
        assert_eq!(received.array(), Some(&array));
        let row = received.into_array().unwrap().unwrap().index(0, 2).unwrap();
        assert_eq!(row.first(2).unwrap(), ["7", "7"]);
        refused(subscriber.try_receive(), "in use");
        drop(row);
        assert!(subscriber.try_receive().unwrap().is_none());
        assert_eq!(publisher.take_back().unwrap(), id);
    }
}

fn whoever_does_not_subscribe_is_refused_and_delays_nobody(subject: Subject) {
    let place = Place::new();
    let begun = Instant::now();
    // Silent, and gone.
    let silent: Vec<Channel> = (0..100).map(|_| dial(&place.path())).collect();
    drop(dial(&place.path()));
    let say = |messages: &[Message]| {
        let mut channel = dial(&place.path());
        messages.iter().for_each(|message| channel.send(message, &[]).unwrap());
        channel
    };
    let hello = |backend: &str, capabilities: &[&str]| {
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        Message::Hello(Hello { version: 1, capabilities, backend: backend.to_owned(), pid: 1, timeout_ms: 20_000 })
    };
    let own = backend(&subject).to_string();
    let subscribe = |keep| Message::Subscribe(Subscribe { keep });
    let mut refused = [
        (say(&[greeting(&subject), request("default", None)]), ErrorCode::Object),
        (say(&[subscribe(1)]), ErrorCode::Protocol),
        (say(&[greeting(&subject), subscribe(0)]), ErrorCode::Protocol),
        (say(&[greeting(&subject), greeting(&subject)]), ErrorCode::Protocol),
        (say(&[hello("hip", &["stream"]), subscribe(1)]), ErrorCode::Backend),
        (say(&[hello(&own, &["streams", ""]), subscribe(1)]), ErrorCode::Protocol),
    ];
    thread::scope(|scope| {
        // The library's own consumer too.
        let consumer = scope.spawn(|| {
            let mut consumer = Consumer::connect(&subject.driver, None, &place.path(), &place.config, &|_| {}).unwrap();
            consumer.request(&handoff::Request::default()).map(drop)
        });
        let subscriber = scope.spawn(|| {
            // Not before those have been heard.
            let told = consumer.join().unwrap();
            let message = "there is no object `default` here: this producer has a stream";
            assert!(matches!(&told, Err(Error::Peer(PeerError::Reported { code: ErrorCode::Object, message: of })) if of.contains(message)));
            place.subscribe(&subject, 1).unwrap()
        });
        let mut publisher = place.accept(&subject).unwrap();
        let mut subscriber = subscriber.join().unwrap();
        let id = buffers(&subject, &mut publisher, 1)[0].0;
        turn(&mut publisher, &mut subscriber, id);
    });
    for (channel, code) in &mut refused {
        let told = loop {
            match answer(channel).0 {
                Message::Hello(_) => {}
                Message::Error(failure) => break failure,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(told.code, *code, "{}", told.message);
    }
    assert!(begun.elapsed() < PATIENCE / 2);
    drop(silent);
}

fn a_producer_without_streams_is_told_apart(subject: Subject) {
    let Place { folder, listener, config, .. } = Place::new();
    let path = folder.path().join("s");
    let shared = Shared::create(&subject.device(), Spec::vmm(10)).unwrap();
    let buffer = Buffer::new(shared, Unchecked, None).unwrap();
    thread::scope(|scope| {
        let producer = scope.spawn(|| serve(listener, &buffer, &ServeOptions::default(), &config, &|_| {}));
        let refused = Subscriber::connect(&subject.driver, None, &path, 1, &config);
        let message = "the producer has no stream to subscribe to";
        assert!(
            matches!(&refused, Err(Error::Peer(PeerError::Mismatch { message: of, .. })) if of == message),
            "{refused:?}"
        );
        let mut channel = dial(&path);
        channel.send(&greeting(&subject), &[]).unwrap();
        let (Message::Hello(theirs), _) = answer(&mut channel) else { panic!() };
        assert_eq!(theirs.capabilities, [""; 0]);
        channel.send(&Message::Subscribe(Subscribe { keep: 1 }), &[]).unwrap();
        let (Message::Error(failure), _) = answer(&mut channel) else { panic!() };
        assert_eq!(failure.code, ErrorCode::Object);
        assert!(failure.message.contains("no stream to subscribe to, only a buffer to request"));
        // Neither counts as a consumer.
        let mut consumer = Consumer::connect(&subject.driver, None, &path, &config, &|_| {}).unwrap();
        let object = consumer.request(&handoff::Request::default()).unwrap();
        consumer.report(&object, &Verdict::unchecked(true)).unwrap();
        drop(object);
        consumer.close();
        assert!(producer.join().unwrap().into_result().unwrap().iter().all(|served| served.error.is_none()));
    });
}

/// What a consumer made by hand says at a time when it may not.
fn a_consumer_that_lies_ends_the_session(subject: Subject) {
    let place = Place::new();
    let turn = |buffer, generation| BufferTurn { buffer, generation };
    let gone = |buffer| Message::Gone(BufferNumber { buffer });
    // Of two buffers the first is out a second time, and the second was never published.
    // The cases of `vmmfd conform` have the other rules.
    let lies = [
        Message::Done(turn(0, 1)),
        gone(1),
        Message::Received(wire::Received { segments: 1 }),
        Message::Withdraw(BufferNumber { buffer: 0 }),
        greeting(&subject),
    ];
    for lie in lies {
        for new in [false, true] {
            // Where a new buffer is on its way this is what belongs there.
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
    // So many segments did not come.
    for segments in [0, 2, u64::MAX] {
        let (mut publisher, mut channel) = place.by_hand(&subject);
        let id = buffers(&subject, &mut publisher, 1)[0].0;
        channel.send(&Message::Received(wire::Received { segments }), &[]).unwrap();
        assert!(matches!(publisher.publish(id), Err(Error::Peer(PeerError::Protocol(_)))));
    }
    // Nor is anybody waited for without end.
    let place = Place::with_timeout(Duration::from_secs(2));
    let (mut publisher, _silent) = place.by_hand(&subject);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    assert!(matches!(publisher.publish(id), Err(Error::Peer(PeerError::Timeout { .. }))));
    refused(publisher.publish(id), "the session has ended");
}

/// A producer made by hand and its subscriber, which is given one buffer, number 4.
struct Liar {
    channel: Channel,
    subscriber: Subscriber,
    offer: Offer,
    memory: Arc<Shared>,
}

impl Liar {
    /// One whose memory is one segment.
    fn new(subject: &Subject) -> Self {
        Self::with(subject, Spec::vmm(100).into())
    }

    /// One whose memory is two segments, of which the first comes with the turn.
    fn of_two(subject: &Subject) -> Self {
        let unit = subject.unit();
        Self::with(subject, Spec::vmm(unit + 100).chunk(unit).into())
    }

    fn with(subject: &Subject, spec: Spec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let config = Config::default().timeout(PATIENCE);
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| Subscriber::connect(&subject.driver, None, &path, 2, &config).unwrap());
            let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            let mut channel = Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap();
            let (Message::Hello(theirs), _) = answer(&mut channel) else { panic!() };
            assert_eq!(theirs.capabilities, ["stream"]);
            channel.send(&greeting(subject), &[]).unwrap();
            assert_eq!(answer(&mut channel).0, Message::Subscribe(Subscribe { keep: 2 }));
            let memory = Arc::new(Shared::create(&subject.device(), spec).unwrap());
            let offer = Offer {
                object: "default".into(),
                memory: (&memory.describe().unwrap()).into(),
                array: None,
                access: ReadOnly,
                part: memory.chunks(0..memory.size()).unwrap().map(|(part, _)| part.into()),
                check: None,
                buffer: Some(4),
            };
            Self { channel, subscriber: subscriber.join().unwrap(), offer, memory }
        })
    }

    fn offer(&mut self, offer: &Offer) {
        self.channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
    }

    /// Begins a turn of this generation, with the first segment.
    fn ready(&mut self, generation: u64) {
        let (_, chunks) = self.memory.chunks(0..1).unwrap().unwrap();
        let ready = Ready { buffer: 4, generation, sizes: vec![chunks[0].size()] };
        self.channel.send(&Message::Ready(ready), &[chunks[0].as_fd()]).unwrap();
    }

    fn lend(&mut self) -> Received {
        let offer = self.offer.clone();
        self.offer(&offer);
        self.ready(1);
        let received = self.subscriber.receive().unwrap();
        assert_eq!(answer(&mut self.channel).0, Message::Received(wire::Received { segments: 1 }));
        received
    }

    /// The subscriber ends the session, and tells why.
    #[track_caller]
    fn found_out(mut self, what: &str) {
        let found = self.subscriber.receive();
        assert!(
            matches!(found, Err(Error::Peer(PeerError::Protocol(_)) | Error::Peer(PeerError::Mismatch { .. }))),
            "{what}: {found:?}"
        );
        assert_eq!(self.subscriber.held(), 0, "{what}");
        refused(self.subscriber.receive(), "the session has ended");
        loop {
            match answer(&mut self.channel).0 {
                // Of what was taken and given back before.
                Message::Done(_) | Message::Gone(_) | Message::Received(_) => {}
                Message::Error(failure) => break assert_eq!(failure.code, ErrorCode::Protocol, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}

fn a_producer_that_lies_ends_the_session(subject: Subject) {
    let turn = |buffer, generation| Message::Ready(Ready { buffer, generation, sizes: Vec::new() });
    let withdraw = |buffer| Message::Withdraw(BufferNumber { buffer });
    // A buffer that is open and not in use. The cases of `vmmfd conform` have the other rules.
    for lie in [turn(4, 1), Message::Gone(BufferNumber { buffer: 4 }), greeting(&subject)] {
        let mut liar = Liar::new(&subject);
        let received = liar.lend();
        liar.subscriber.give_back(received).unwrap();
        liar.channel.send(&lie, &[]).unwrap();
        liar.found_out(&format!("{lie:?}"));
    }
    // One that is in use.
    for lies in [&[turn(4, 2)][..], &[withdraw(4), withdraw(4)], &[withdraw(4), turn(4, 2)]] {
        let mut liar = Liar::new(&subject);
        let _received = liar.lend();
        lies.iter().for_each(|lie| liar.channel.send(lie, &[]).unwrap());
        liar.found_out(&format!("{lies:?}"));
    }
    let mut liar = Liar::new(&subject);
    let mut offer = liar.offer.clone();
    // All of an object that has more.
    offer.memory.mapped_size *= 2;
    offer.memory.segments = 2;
    liar.offer(&offer);
    liar.ready(1);
    liar.found_out("a part of it");
    // What follows it.
    for follower in [turn(4, 2), withdraw(4), Message::Received(wire::Received { segments: 0 })] {
        let mut liar = Liar::of_two(&subject);
        let offer = liar.offer.clone();
        liar.offer(&offer);
        liar.ready(1);
        liar.channel.send(&follower, &[]).unwrap();
        liar.found_out(&format!("{follower:?} where segments belong"));
    }
    // And a producer that dies there.
    let mut liar = Liar::of_two(&subject);
    let offer = liar.offer.clone();
    liar.offer(&offer);
    liar.ready(1);
    let Liar { channel, mut subscriber, .. } = liar;
    drop(channel);
    assert!(matches!(subscriber.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    assert_eq!(subscriber.held(), 0);
}

fn a_turn_that_comes_with_a_descriptor_is_refused(subject: Subject) {
    let null = File::open("/dev/null").unwrap();
    let mut liar = Liar::new(&subject);
    let received = liar.lend();
    liar.subscriber.give_back(received).unwrap();
    let record = Message::Ready(Ready { buffer: 4, generation: 2, sizes: Vec::new() }).encode().unwrap();
    // The channel sends no such thing.
    let socket = std::os::unix::net::UnixStream::from(liar.channel_socket());
    socket.send_with_fd(&record, &[null.as_raw_fd()]).unwrap();
    liar.found_out("a descriptor with ready");
}

impl Liar {
    /// Another descriptor of the channel's socket.
    fn channel_socket(&self) -> OwnedFd {
        self.channel.as_fd().try_clone_to_owned().unwrap()
    }
}

/// Both ends of a stream of two buffers and what a failure could interrupt there.
fn everything(subject: &Subject, device: &Device, place: &Place) -> Result<()> {
    // An end that fails before it is connected would leave the other one to wait.
    let alone = |_: &Error| place.cancel.cancel(CancelReason::Program);
    let vmm = Spec::vmm(1).into();
    let specs = if subject.kind == Kind::Host { vec![vmm] } else { vec![vmm, Spec::pool(1)] };
    let memory = |spec: Spec| Shared::create(device, spec).map(Arc::new);
    let consume = || -> Result<()> {
        let mut subscriber = place.subscribe(subject, 1).inspect_err(alone)?;
        for _ in 0..3 * specs.len() {
            let received = subscriber.receive()?;
            subscriber.give_back(received)?;
        }
        drop(subscriber.receive()?);
        match subscriber.receive() {
            Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
            other => other.map(drop),
        }
    };
    let produce = || -> Result<()> {
        let mut publisher = place.accept(subject).inspect_err(alone)?;
        let mut last = None;
        for &spec in &specs {
            let (one, two) = (memory(spec)?, memory(spec)?);
            let ids = [publisher.add(&one, None, ReadWrite)?, publisher.add(&two, None, ReadWrite)?];
            for id in [ids[0], ids[0], ids[1]] {
                publisher.publish(id)?;
                publisher.take_back()?;
            }
            last = Some(ids[1]);
        }
        publisher.publish(last.expect("a mechanism"))?;
        publisher.withdraw(last.expect("a mechanism"))
    };
    thread::scope(|scope| {
        let consumer = scope.spawn(consume);
        let produced = produce();
        consumer.join().unwrap().and(produced)
    })
}

fn a_failure_at_any_call_leaves_nothing(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    everything(&subject, &device, &Place::new()).unwrap();
    let failed = subject.fail_each_call(|| everything(&subject, &device, &Place::new()));
    assert!(failed.len() > 20 && failed.contains(&"set_access"), "{failed:?}");
}

fn buffers_of_a_pool_share_it(subject: Subject) {
    let place = Place::new();
    let pool = Pool::create(&subject.device()).unwrap();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let memory: Vec<Arc<Shared>> = (0..3).map(|_| Arc::new(Shared::in_pool(&pool, 100).unwrap())).collect();
    let ids: Vec<BufferId> = memory.iter().map(|memory| publisher.add(memory, None, ReadWrite).unwrap()).collect();
    let imports = |turn: &mut dyn FnMut()| {
        subject.faulty.take_verbs();
        turn();
        subject.faulty.take_verbs().iter().filter(|verb| **verb == "pool import").count()
    };
    // The third displaces the first, and the pool stays.
    for (round, index, pools) in [(0u8, 0, 1), (1, 1, 0), (2, 1, 0), (3, 2, 0), (4, 0, 0)] {
        memory[index].copy_in(0, &[round; 9]).unwrap();
        let imported = imports(&mut || {
            let received = hand_over(&mut publisher, &mut subscriber, ids[index]);
            assert_eq!((read(&received, 0), received.is_protected()), ([round; 9], false));
            subscriber.give_back(received).unwrap();
            publisher.take_back().unwrap();
        });
        assert_eq!((imported, subscriber.held().min(2)), (pools, subscriber.held()), "round {round}");
    }
    // Without a buffer of it the pool goes too, and comes again.
    let (live, in_use) = (subject.faulty.taken(), hand_over(&mut publisher, &mut subscriber, ids[0]));
    thread::scope(|scope| {
        scope.spawn(|| {
            subscriber.give_back(in_use).unwrap();
            until_held(&mut subscriber, 0);
        });
        publisher.withdraw(ids[0]).unwrap();
        publisher.withdraw(ids[2]).unwrap();
    });
    assert_eq!((subject.faulty.taken().0, subject.faulty.taken().1), (live.0 - 2, live.1 - 1));
    assert_eq!(imports(&mut || turn(&mut publisher, &mut subscriber, ids[1])), 1);

    // A pool that does not come, or another.
    let mut liar = Liar::new(&subject);
    let description = memory[1].describe().unwrap();
    let offer = Offer { memory: (&description).into(), part: None, ..liar.offer.clone() };
    liar.offer(&offer);
    let ready = Ready { buffer: 4, generation: 1, sizes: Vec::new() };
    liar.channel.send(&Message::Ready(ready), &[]).unwrap();
    let number = offer.memory.pool.unwrap() + 1;
    liar.channel.send(&Message::Pool(PoolNumber { pool: number }), &[pool.export().unwrap()]).unwrap();
    liar.found_out("another pool");
}

fn a_pool_comes_again_after_a_withdrawal_that_took_long(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 2000));
    let pool = Pool::create(&subject.device()).unwrap();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let memory = [100, 200].map(|size| Arc::new(Shared::in_pool(&pool, size).unwrap()));
    let [a, b] = memory.each_ref().map(|memory| publisher.add(memory, None, ReadOnly).unwrap());
    let in_use = hand_over(&mut publisher, &mut subscriber, a);
    assert!(matches!(publisher.withdraw(a), Err(Error::Peer(PeerError::Timeout { .. }))), "it is in use");
    assert!(subscriber.try_receive().unwrap().is_none());
    // The producer has not heard yet that it is gone.
    subscriber.give_back(in_use).unwrap();
    assert_eq!(subscriber.held(), 0);
    let received = hand_over(&mut publisher, &mut subscriber, b);
    subscriber.give_back(received).unwrap();
    publisher.withdraw(a).unwrap();
    assert_eq!(publisher.take_back().unwrap(), b);
}

/// A stream of one buffer of a pool, which is the consumer's; nobody else has the memory.
fn borrowing(subject: &Subject, place: &Place) -> (Publisher, Subscriber, Received) {
    let (mut publisher, mut subscriber) = place.meet(subject, 1);
    let memory = Arc::new(Shared::create(&subject.device(), Spec::pool(100)).unwrap());
    let id = publisher.add(&memory, None, ReadWrite).unwrap();
    memory.copy_in(0, b"there").unwrap();
    let received = hand_over(&mut publisher, &mut subscriber, id);
    (publisher, subscriber, received)
}

fn a_producer_waits_until_what_is_borrowed_is_closed(subject: Subject) {
    const A_WHILE: Duration = Duration::from_millis(100);
    let place = Place::new();
    // Whoever waits for a buffer lets go at once, and the subscriber stays.
    let (publisher, mut subscriber, received) = borrowing(&subject, &place);
    subscriber.give_back(received).unwrap();
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| publisher.close());
        assert!(matches!(subscriber.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    });
    assert!(begun.elapsed() < PATIENCE / 2);
    subject.assert_empty();
    // What is in use is waited for, also without the subscriber.
    for ends in [true, false] {
        let (publisher, subscriber, received) = borrowing(&subject, &place);
        let subscriber = Some(subscriber).filter(|_| !ends);
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(A_WHILE);
                assert_eq!(read(&received, 0), *b"there");
                drop((received, subscriber));
            });
            publisher.close();
            assert!((A_WHILE..PATIENCE / 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        });
        subject.assert_empty();
    }
}

fn memory_that_is_borrowed_and_not_closed_stays_allocated(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 2000));
    let (publisher, subscriber, received) = borrowing(&subject, &place);
    let begun = Instant::now();
    publisher.close();
    assert!(begun.elapsed() >= place.config.timeout);
    assert_eq!(read(&received, 0), *b"there");
    drop((received, subscriber));
    // It is there still: it goes with the process.
    let (blocks, pools, _) = subject.faulty.taken();
    assert_eq!((blocks, pools), (1, 1));
    subject.forget();
}

fn legacy_memory_is_streamed_to_another_process(subject: Subject) {
    let name = if subject.kind == Kind::Fake { "fake" } else { "cuda" };
    let test = format!("stream::{name}::legacy_memory_is_streamed_to_another_process");
    let place = Place::new();
    const ROUNDS: u8 = 6;
    thread::scope(|scope| {
        let (path, subject) = (place.path(), &subject);
        let consumer = scope.spawn(move || {
            let prepare = |command: &mut Command| {
                command.env("STREAM", path);
            };
            in_child(&test, prepare, || {
                let config = Config::default().timeout(PATIENCE);
                let path = PathBuf::from(env::var_os("STREAM").unwrap());
                let mut subscriber = Subscriber::connect(&subject.driver, None, &path, 1, &config).unwrap();
                let mut seen = Vec::new();
                for _ in 0..ROUNDS {
                    let received = subscriber.receive().unwrap();
                    assert!(!received.is_protected());
                    seen.extend(read::<1>(&received, 0));
                    received.copy_in(1, &[!seen[seen.len() - 1]]).unwrap();
                    subscriber.give_back(received).unwrap();
                }
                let end = subscriber.receive();
                assert!(matches!(end, Err(Error::Peer(PeerError::Gone { .. }))), "{end:?}");
                assert_eq!(subscriber.held(), 0);
                format!("{seen:?}")
            })
        });
        let mut publisher = place.accept(subject).unwrap();
        let memory = [(); 2].map(|()| Arc::new(Shared::create(&subject.device(), Spec::legacy(100)).unwrap()));
        let ids = memory.each_ref().map(|memory| publisher.add(memory, None, ReadWrite).unwrap());
        for round in 0..ROUNDS {
            // Each stays for two turns, and the bound is one.
            let index = usize::from(round / 2) % 2;
            memory[index].copy_in(0, &[round]).unwrap();
            publisher.publish(ids[index]).unwrap();
            assert_eq!(publisher.take_back().unwrap(), ids[index]);
            assert_eq!(read(&*memory[index], 1), [!round]);
        }
        // Nobody has to wait for a consumer that goes.
        let begun = Instant::now();
        publisher.close();
        assert!(begun.elapsed() < PATIENCE / 2);
        assert_eq!(consumer.join().unwrap(), "[0, 1, 2, 3, 4, 5]");
    });
}
