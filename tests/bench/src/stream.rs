//! The group `stream`: publications at a fixed rate to several subscribers, each a process, and the publisher's CPU time.

use rustix::time::{ClockId, clock_gettime};
use vmmfd::{
    driver::Stream,
    session::{order::Timeline, stream::Publisher},
};

use crate::{
    handoff::{COPIES, Pair},
    load::CONTEXT,
    prelude::*,
};

/// The time between two publications is two ticks: one with a publication, one without. All subscribers are asleep again after one.
const TICK: Duration = Duration::from_millis(2);

/// The most publications: a record reports the times of all.
const MOST: usize = 3000;

/// With one number of subscribers: the number, the publisher's CPU time for a publication, and the median until the last subscriber
/// has it, in microseconds.
type Measured = (u16, f64, f64);

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let mut all: Vec<(u64, bool, Vec<Measured>)> = Vec::new();
    for subscribers in run.consumers() {
        let needed = (u64::from(subscribers) + 1) * CONTEXT;
        let free = run.usable(&run.device()?)?;
        if run.is_cuda() && needed > free {
            run.leave_out(format!(
                "{subscribers} subscribers: they need {}, and {} are free",
                about(needed),
                about(free)
            ));
            continue;
        }
        let mut pair = Pair::start(run, subscribers)?;
        for size in run.sizes(&pair.device, COPIES as u64 + u64::from(subscribers))? {
            pair.prepare(size, 1, &[Way::Again])?;
            let stream = run.is_cuda().then(|| pair.device.driver().create_stream(pair.device.ordinal()));
            let stream = stream.transpose()?;
            for stream in [None, stream.as_ref()].into_iter().take(1 + usize::from(run.is_cuda())) {
                let measured = publications(run, &pair, (subscribers, size), stream)?;
                let on = stream.is_some();
                match all.iter_mut().find(|(other, is_on, _)| (*other, *is_on) == (size, on)) {
                    Some((.., of)) => of.push(measured),
                    None => all.push((size, on, vec![measured])),
                }
            }
            if let Some(stream) = stream.filter(|_| subscribers == 1) {
                timeline(run, &pair, &stream)?;
            }
            pair.clear()?;
        }
    }
    for (size, on, of) in all {
        let (Some(few), Some(many)) = (of.first(), of.last()) else { continue };
        if few.0 < many.0 {
            let more = f64::from(many.0 - few.0);
            let numbers = [("publisher's CPU", (many.1 - few.1) / more), ("last receipt", (many.2 - few.2) / more)];
            let on = if on { ", on streams" } else { "" };
            let named =
                |(what, number)| (format!("{}: each further subscriber, {what}{on}", about(size)), number, "us");
            run.derive(About { consumers: many.0, ..About::size(size) }, numbers.map(named).into())?;
        }
    }
    Ok(())
}

/// From the record on a stream until another process's stream goes on, which has waited before: the floor of the order on GPUs.
fn timeline(run: &mut Run<'_>, pair: &Pair, stream: &Stream) -> Result<()> {
    let timeline = Timeline::create(&pair.device)?;
    let values = run.count().min(MOST) as u64;
    pair.peer().call(&Request::Await { values }, &[timeline.as_fd()])?;
    let mut begun = Vec::new();
    for done in 0..values {
        run.tick("recording on a timeline", done as usize, values as usize)?;
        thread::sleep(TICK);
        begun.push(now());
        timeline.record(stream)?;
    }
    let ended: Vec<u64> = pair.peer().receive()?;
    let took = ended.iter().zip(&begun).map(|(end, begin)| end.saturating_sub(*begin) as f64 / 1e3).collect();
    run.add(About::size(0), vec![("timeline, record to the other stream".to_owned(), took)], None).map(drop)
}

/// Publishes to all subscribers of the pair, on a stream if there is one.
fn publications(
    run: &mut Run<'_>,
    pair: &Pair,
    (subscribers, size): (u16, u64),
    stream: Option<&Stream>,
) -> Result<Measured> {
    const NAMES: [&str; 2] = ["publisher's CPU, with a publication", "publisher's CPU, without"];
    let publisher = pair.publisher()?;
    let on = if stream.is_some() { ", on streams" } else { "" };
    pair.peers().try_for_each(|peer| peer.call(&Request::Follow { on_stream: stream.is_some() }, &[]))?;
    let names = NAMES.map(|name| format!("{name}{on}"));
    let names = names.each_ref().map(String::as_str);
    let mut rows = run.rounds(&format!("publishing {}{on}", about(size)), &names, MOST, |_| {
        let publishes = tick(|| publish(publisher, &now().to_ne_bytes(), stream))?;
        Ok(vec![publishes, tick(|| Ok(()))?])
    })?;
    // A subscriber that still has a buffer would skip the next to last.
    let deadline = Instant::now() + run.options.timeout;
    while publisher.stats()?.subscribers.iter().any(|usage| usage.buffers > 0) && Instant::now() < deadline {
        run.cancel.check()?;
        thread::sleep(TICK);
    }
    let last = publisher.stats()?.published;
    let dense = back_to_back(run, publisher, stream)?;
    publish(publisher, &[], None)?;
    let count = rows[0].1.len();
    let mut receipts: Vec<(u64, f64)> = Vec::new();
    for peer in pair.peers() {
        receipts.extend(peer.receive::<Vec<(u64, f64)>>()?);
    }
    // The publications of the warm-up are the first, and those without a pause the last.
    receipts.retain(|(number, _)| number + count as u64 > last && *number <= last);
    // By time, so that the report shows a drift.
    receipts.sort_by_key(|(number, _)| *number);
    let last_of = |of: &[(u64, f64)]| of.iter().map(|(_, took)| *took).fold(0.0, f64::max);
    let lasts = receipts.chunk_by(|one, other| one.0 == other.0).map(last_of).collect();
    let skipped = 1.0 - receipts.len() as f64 / (count as f64 * f64::from(subscribers));
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / count as f64;
    let cpu = mean(&rows[0].1) - mean(&rows[1].1);
    let receipts = receipts.into_iter().map(|(_, took)| took).collect();
    rows.splice(
        0..0,
        [(format!("publication to receipt{on}"), receipts), (format!("publication to the last receipt{on}"), lasts)],
    );
    let of = About { consumers: subscribers, ..About::size(size) };
    let medians = run.add(of, rows, None)?;
    let numbers = [
        ("publisher's CPU for a publication", cpu, "us"),
        ("publisher's CPU for one of many in a row", dense, "us"),
        ("skipped", skipped * 100.0, "%"),
    ];
    run.derive(of, numbers.map(|(name, number, unit)| (format!("{name}{on}"), number, unit)).into())?;
    Ok((subscribers, cpu, medians[1]))
}

fn publish(publisher: &Publisher, user: &[u8], stream: Option<&Stream>) -> Result<()> {
    let loan = publisher.try_loan()?.ok_or_else(not_prepared)?;
    match stream {
        Some(stream) => loan.publish_on(stream, user).map(drop),
        None => loan.publish(user).map(drop),
    }
}

/// The CPU time of a publication without a pause before the next: no subscriber receives most of them.
fn back_to_back(run: &Run<'_>, publisher: &Publisher, stream: Option<&Stream>) -> Result<f64> {
    let count = run.count().min(MOST);
    let begun = cpu();
    for _ in 0..count {
        let loan = publisher.loan(run.options.timeout)?;
        match stream {
            Some(stream) => loan.publish_on(stream, &now().to_ne_bytes())?,
            None => loan.publish(&now().to_ne_bytes())?,
        };
    }
    Ok((cpu() - begun) / count as f64)
}

/// The CPU time of this process's threads in microseconds, in a tick that begins with `work`.
fn tick(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (begun, cpu) = (Instant::now(), cpu());
    work()?;
    thread::sleep(TICK.saturating_sub(begun.elapsed()));
    Ok(self::cpu() - cpu)
}

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
