//! Carrying orders out: changes of settings at once, by the helper; what takes long by a thread that ends when there is nothing left to
//! do. The helper has other things to do, and must not wait for anybody's callback.
//!
//! Files are opened by the helper, whose table of descriptors is its own: the thread is started by it, and shares that. So it runs no
//! code of the program, which would not find its files: that does the thread that defragments, and this one waits for it.

use super::answer::Sheet;
use super::orders::{Action, Order, Outcome};
use crate::error::Result;
use crate::published::Subject;
use crate::slab::{ShrinkReport, Slabs};
use crate::sync::Guarded;
use pagemill_sys::file::Blank;
use pagemill_sys::thread;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Orders that may wait.
const MOST_WAITING: usize = 8;

const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;
const ECANCELED: i32 = 125;

/// An order whose file says that it was taken.
struct Job {
    file: Blank,
    number: u32,
    order: Order,
}

struct Desk {
    /// The oldest first.
    waiting: [Option<Job>; MOST_WAITING],
    /// There is a thread, which will look here again.
    is_working: bool,
}

pub(crate) struct Clerk {
    slabs: &'static Slabs,
    desk: Guarded<Desk>,
}

impl Clerk {
    pub fn new(slabs: &'static Slabs) -> Self {
        let desk = Desk { waiting: [const { None }; MOST_WAITING], is_working: false };
        Self { slabs, desk: Guarded::new(desk) }
    }

    /// Takes an order, if there is one in the file. By the helper.
    pub fn take(&'static self, path: &CStr, number: u32) {
        let mut bytes = [0; Order::LEN];
        // Who asked has gone, or is not who may ask: there is nobody to tell.
        let Ok(file) = Blank::open_with(path, &mut bytes) else { return };
        let Some(order) = Order::from_bytes(&bytes, number) else { return };
        let job = Job { file, number, order };
        match order.action {
            Action::SetUsedRatio(_) | Action::SetRemoteRatio(_) => self.carry_out(&job),
            Action::Shrink => self.put_off(job),
        }
    }

    /// Leaves it to the thread.
    fn put_off(&'static self, job: Job) {
        // Before it is on the desk: who asked must not find it done and not taken.
        let _ = job.file.write_at(&1_u32.to_le_bytes(), Order::TAKEN_AT as u64);
        let (refused, is_idle) = self.desk.with(|desk| {
            let Some(place) = desk.waiting.iter_mut().find(|place| place.is_none()) else { return (Some(job), false) };
            *place = Some(job);
            (None, !std::mem::replace(&mut desk.is_working, true))
        });
        if let Some(job) = refused {
            answer(&job, Outcome::failed(job.order.cache, EAGAIN));
        }
        if is_idle && thread::spawn(c"pagemill-orders", self).is_err() {
            while let Some(job) = self.next() {
                answer(&job, Outcome::failed(job.order.cache, EAGAIN));
            }
        }
    }

    /// The next order; without one the thread is over.
    fn next(&self) -> Option<Job> {
        self.desk.with(|desk| {
            let job = desk.waiting[0].take();
            desk.waiting.rotate_left(1);
            desk.is_working = job.is_some();
            job
        })
    }

    fn carry_out(&self, job: &Job) {
        // Who is the last to have a cache ends what its user put into it, which may panic.
        let done = catch_unwind(AssertUnwindSafe(|| self.outcome(job.order)));
        answer(job, done.unwrap_or_else(|_| Outcome::failed(job.order.cache, ECANCELED)));
    }

    fn outcome(&self, Order { action, cache: id }: Order) -> Outcome {
        let slabs = self.slabs;
        let done: Option<Result<ShrinkReport>> = match action {
            Action::SetUsedRatio(percent) => {
                slabs.set_used_ratio(id, percent).map(|set| set.map(|()| ShrinkReport::default()))
            }
            Action::SetRemoteRatio(percent) => {
                slabs.set_remote_ratio(id, percent).map(|set| set.map(|()| ShrinkReport::default()))
            }
            Action::Shrink => slabs.shrink_one(id),
        };
        match done {
            Some(Ok(shrunk)) => Outcome { cache: id, shrunk, errno: 0 },
            Some(Err(error)) => Outcome::failed(id, error.errno()),
            None => Outcome::failed(id, ENOENT),
        }
    }

    pub fn acquire_for_fork(&self) {
        self.desk.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.desk.release();
    }

    /// The child has neither the thread nor its files: their numbers may be others' here.
    pub fn begin_child(&self) {
        self.desk.with(|desk| {
            desk.waiting.iter_mut().for_each(|place| std::mem::forget(place.take()));
            desk.is_working = false;
        });
    }
}

impl thread::Work for Clerk {
    fn work(&'static self) {
        while let Some(job) = self.next() {
            self.carry_out(&job);
        }
    }
}

fn answer(job: &Job, outcome: Outcome) {
    let mut sheet = Sheet::behind(&job.file, Order::LEN);
    let result = sheet.put(&outcome.to_record());
    let _ = sheet.end(job.number, Subject::SlabOrder, result);
}
