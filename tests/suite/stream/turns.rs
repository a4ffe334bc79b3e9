//! Buffers that a consumer reuses.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    republished_buffer_is_not_mapped_again,
    rotating_buffers_carry_data_both_ways,
    buffers_of_many_segments_are_whole,
    least_recently_used_buffer_makes_room,
    buffer_in_use_is_not_unmapped,
    receive_fails_while_all_are_used,
    withdrawn_buffer_is_unmapped_after_use,
    dropped_buffer_returns_with_next_call,
    last_view_returns_its_buffer,
    ]
}

fn republished_buffer_is_not_mapped_again(subject: Subject) {
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 2);
    let (id, memory) = buffers(&subject, &mut publisher, 1).remove(0);
    let before = subject.live();
    let first = hand_over(&mut publisher, &mut subscriber, id);
    let (address, mapped_size) = (first.address(), memory.mapped_size());
    assert_eq!((first.size(), first.mapped_size(), first.access()), (100, mapped_size, ReadWrite));
    assert_eq!(first.array(), None);
    assert_eq!((subject.live().mappings, subscriber.held()), (before.mappings + 1, 1));
    subscriber.give_back(first).unwrap();
    assert_eq!(publisher.take_back().unwrap(), id);
    // No handle and no descriptor remains open.
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
        // One call on each side, and no other driver call.
        assert_eq!(subject.faulty.take_verbs(), ["synchronize"; 2]);
    }
    assert_eq!(subject.live(), live);
}

fn rotating_buffers_carry_data_both_ways(subject: Subject) {
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 3);
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

fn buffers_of_many_segments_are_whole(subject: Subject) {
    let unit = subject.unit();
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 1);
    // More than one record, where this is cheap. Many segments would take long on a GPU.
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
    // At most the handles of one record are open at a time.
    let expected = if count > MAX_FDS as u64 { MAX_FDS } else { 0 };
    assert_eq!((releases(&verbs[..last]), releases(&verbs)), (expected, expected));
    assert_eq!((received.size(), read(&received, (count - 1) * unit - 2)), (count * unit, *b"over"));
    assert!(received.copy_in(0, b"x").is_err(), "it is read-only");
    subscriber.give_back(received).unwrap();
    publisher.take_back().unwrap();
}

fn least_recently_used_buffer_makes_room(subject: Subject) {
    let (mut publisher, mut subscriber, ids) = stream(&subject, 2, 3);
    let own = subject.live().mappings;
    assert_eq!(publisher.keeps(), 2);
    let imports = |publisher: &mut Publisher, subscriber: &mut Subscriber, id| {
        subject.faulty.take_verbs();
        turn(publisher, subscriber, id);
        assert!(subscriber.held() <= 2 && subject.live().mappings - own == subscriber.held());
        let verbs = subject.faulty.take_verbs();
        let at = |verb| verbs.iter().position(|of| *of == verb);
        // The bound is strict: the old buffer is closed before the new one is opened.
        assert!(at("unmap").is_none_or(|unmap| unmap < at("import").unwrap()), "{verbs:?}");
        at("import").is_some()
    };
    let mut turns = Vec::new();
    for index in [0, 1, 0, 2, 0, 1, 2, 2, 1] {
        turns.push(imports(&mut publisher, &mut subscriber, ids[index]));
    }
    // Buffer 2 displaces 1, 1 displaces 2, and 2 displaces 0.
    assert_eq!(turns, [true, true, false, true, false, true, true, false, false]);
}

fn buffer_in_use_is_not_unmapped(subject: Subject) {
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 2);
    let buffers = buffers(&subject, &mut publisher, 3);
    let [a, b, c] = [0, 1, 2].map(|index| buffers[index].0);
    let in_use = hand_over(&mut publisher, &mut subscriber, a);
    turn(&mut publisher, &mut subscriber, b);
    // The buffer in use is the least recently used.
    turn(&mut publisher, &mut subscriber, c);
    buffers[0].1.copy_in(0, b"there").unwrap();
    assert_eq!(read(&in_use, 0), *b"there");
    subscriber.give_back(in_use).unwrap();
    assert_eq!(publisher.take_back().unwrap(), a);
    subject.faulty.take_verbs();
    turn(&mut publisher, &mut subscriber, a);
    assert!(!subject.faulty.take_verbs().contains(&"import"));
}

fn receive_fails_while_all_are_used(subject: Subject) {
    let (mut publisher, mut subscriber, ids) = stream(&subject, 1, 2);
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

fn withdrawn_buffer_is_unmapped_after_use(subject: Subject) {
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 4);
    let buffers = buffers(&subject, &mut publisher, 5);
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|index| buffers[index].0);
    let own = subject.live().mappings;
    turn(&mut publisher, &mut subscriber, a);
    let in_use = hand_over(&mut publisher, &mut subscriber, b);
    // The buffer is returned, but the publisher has not taken it back.
    let unasked = hand_over(&mut publisher, &mut subscriber, c);
    subscriber.give_back(unasked).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            // The consumer waits for a buffer during the withdrawal.
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
    for id in [a, b, c] {
        refused(publisher.publish(id), "there is no buffer");
        refused(publisher.withdraw(id), "there is no buffer");
    }
    // A buffer that is dropped while the subscriber waits for another.
    let dropped = hand_over(&mut publisher, &mut subscriber, e);
    thread::scope(|scope| {
        let next = scope.spawn(|| subscriber.receive().unwrap().id());
        thread::sleep(Duration::from_millis(50));
        drop(dropped);
        publisher.withdraw(e).unwrap();
        // Buffer `d` was returned before the wait.
        assert_eq!(publisher.take_back().unwrap(), d);
        publisher.publish(d).unwrap();
        assert_eq!(next.join().unwrap().number(), d.number());
    });
    // Withdrawn buffers do not come back. The last buffer was dropped.
    assert!(matches!(subscriber.try_receive(), Ok(None)));
    assert_eq!(publisher.take_back().unwrap(), d);
    let never_published = publisher.add(&buffers[0].1, None, ReadOnly).unwrap();
    assert!(never_published > e, "a number is not used again");
    publisher.withdraw(never_published).unwrap();
}

fn dropped_buffer_returns_with_next_call(subject: Subject) {
    let (mut publisher, mut subscriber, ids) = stream(&subject, 1, 2);
    for id in [ids[0], ids[0], ids[1], ids[0]] {
        // The bound is one: the next buffer needs the dropped one's place.
        drop(hand_over(&mut publisher, &mut subscriber, id));
        assert!(publisher.is_out(id));
        assert!(publisher.try_take_back().unwrap().is_none(), "before the next call");
        assert!(subscriber.try_receive().unwrap().is_none());
        assert_eq!(publisher.take_back().unwrap(), id);
    }
}

fn last_view_returns_its_buffer(subject: Subject) {
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 1);
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
