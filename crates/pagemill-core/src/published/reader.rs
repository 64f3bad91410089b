//! Reads the figures and the usage of all processes repeatedly. The files stay open between two reads, because opening
//! and closing a file takes about as long as reading it.

use super::survey::{ProcessFiles, Survey};
use super::{Process, TreeFolder};
use crate::stats;
use pagemill_sys::file::{Path, PublishedFile};
use pagemill_sys::process::{self, Identity, StatFile, Usage};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Age from which the folders are listed again, although none has changed, and from which it is checked again whether
/// files belong to their process. Without this, a new folder of another user could stay unnoticed.
const MAX_SURVEY_AGE: Duration = Duration::from_secs(10);

/// Maximum number of descriptors that stay open. The limit is half of `RLIMIT_NOFILE` if that is lower.
const MAX_DESCRIPTORS: usize = 4000;

/// Usage and figures of a running process, from one read.
///
/// Example: [`Reader`].
pub struct Reading {
    pub usage: Usage,
    /// The owner of the folder with the figures of the process.
    pub user: u32,
    /// The `pagemill run` that started the tree of the process.
    pub run: Option<Identity>,
    /// The published figures; `None` if the process has ended meanwhile, if no file can be opened, or if none has figures
    /// of this version of Pagemill.
    pub process: Option<Process>,
}

/// Reads all running processes that publish figures and that this user may read: for root those of all users.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::published::Reader;
///
/// Testbed::of_process()?;
/// let mut reader = Reader::default();
/// for _ in 0..2 {
///     let readings = reader.read();
///     let own = readings.iter().find(|reading| reading.usage.identity.pid == std::process::id()).unwrap();
///     assert!(own.process.is_some() && own.usage.threads >= 1);
/// }
/// println!("{} process trees", reader.trees().len());
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Default)]
pub struct Reader {
    survey: Survey,
    surveyed: Option<Instant>,
    /// In the order of the survey.
    followed: Vec<Followed>,
}

/// A process of the survey. Its files are open from the first read on, if enough descriptors are left.
struct Followed {
    files: ProcessFiles,
    /// When the files were last known to belong to the process.
    trusted_at: Option<Instant>,
    stat: Option<StatFile>,
    /// Empty while `stat` is not open.
    figures: Vec<(Path, PublishedFile)>,
}

impl Reader {
    /// Reads the processes, in the order of their ids. Takes some 15 us for each process, and 40 us at the first read.
    pub fn read(&mut self) -> Vec<Reading> {
        self.list_files();
        let limit = (process::descriptor_limit() / 2).min(MAX_DESCRIPTORS);
        let mut left = limit.saturating_sub(self.followed.iter().map(Followed::open_descriptors).sum());
        let (own, mut readings) = (process::user_id(), Vec::<Reading>::new());
        for followed in &mut self.followed {
            // Another folder may have files of the same process.
            let pid = followed.files.identity.pid;
            let is_same = |last: &Reading| last.usage.identity.pid == pid;
            if let Some(last) = readings.last_mut().filter(|last| last.process.is_some() && is_same(last)) {
                if followed.files.user == own {
                    last.run = last.run.or(followed.files.run);
                }
                continue;
            }
            let needed = 1 + followed.files.paths.len() - followed.open_descriptors();
            if let Some(reading) = followed.read(needed <= left) {
                readings.pop_if(|last| is_same(last));
                readings.push(reading);
                left = left.saturating_sub(needed);
            }
        }
        readings
    }

    /// Returns the folders of the process trees, as of the last [`read`](Self::read).
    pub fn trees(&self) -> &[TreeFolder] {
        &self.survey.trees
    }

    /// Lists the files of processes again if a folder has changed since the last list, or if that is older than
    /// [`MAX_SURVEY_AGE`].
    fn list_files(&mut self) {
        let is_recent = self.surveyed.is_some_and(|surveyed| surveyed.elapsed() < MAX_SURVEY_AGE);
        if is_recent && self.survey.is_current() {
            return;
        }
        self.survey = Survey::of_all_users();
        self.surveyed = Some(Instant::now());
        let known = std::mem::take(&mut self.followed).into_iter();
        let mut known: HashMap<_, _> =
            known.map(|followed| ((followed.files.identity, followed.files.user), followed)).collect();
        let follow = |files: ProcessFiles| match known.remove(&(files.identity, files.user)) {
            Some(followed) => followed.with_files(files),
            None => Followed { files, trusted_at: None, stat: None, figures: Vec::new() },
        };
        self.followed = std::mem::take(&mut self.survey.processes).into_iter().map(follow).collect();
    }
}

impl Followed {
    /// Replaces the list of files. Closes the figures files if other files are listed, if one could not be opened, or if
    /// one was removed and may have been created again.
    fn with_files(mut self, files: ProcessFiles) -> Self {
        let has_all = self.figures.len() == files.paths.len() && self.files.paths == files.paths;
        if !has_all || self.figures.iter().any(|(_, file)| file.is_removed()) {
            self.figures.clear();
        }
        self.files = files;
        self
    }

    fn open_descriptors(&self) -> usize {
        usize::from(self.stat.is_some()) + self.figures.len()
    }

    /// Reads the process. Returns `None` if it has ended, or if the files do not belong to it. The files stay open if
    /// `keeps_open` is set.
    fn read(&mut self, keeps_open: bool) -> Option<Reading> {
        let (identity, user) = (self.files.identity, self.files.user);
        // What is not stored again below is closed.
        let (stat, mut figures) = (self.stat.take(), std::mem::take(&mut self.figures));
        let stat = stat.or_else(|| StatFile::open(identity.pid))?;
        // A process without `/proc` publishes a start time of 0.
        let usage = stat.usage().filter(|usage| usage.identity == identity || identity.start_ticks == 0)?;
        // The user of a process may change.
        if self.trusted_at.is_none_or(|trusted_at| trusted_at.elapsed() >= MAX_SURVEY_AGE) {
            self.trusted_at = self.files.is_trusted().then(Instant::now);
        }
        self.trusted_at?;
        if figures.is_empty() {
            let owner = (user != process::user_id()).then_some(user);
            let open = |path: &Path| Some((path.clone(), PublishedFile::open(path.as_c_str(), owner).ok()?));
            figures = self.files.paths.iter().filter_map(open).collect();
        }
        let read = |(path, file): &(Path, PublishedFile)| {
            let snapshot = stats::read_file(file).ok()?;
            (snapshot.identity == identity).then(|| (path.clone(), snapshot))
        };
        let found: Vec<_> = figures.iter().filter_map(read).collect();
        if keeps_open {
            (self.stat, self.figures) = (Some(stat), figures);
        }
        let process = (!found.is_empty()).then_some(Process { identity, user, found });
        Some(Reading { usage, user, run: self.files.run, process })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A process that runs until it is dropped, with figures that a test publishes for it.
    struct TestProcess {
        process: Child,
        folder: tempfile::TempDir,
    }

    impl TestProcess {
        fn new() -> Self {
            let process = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            Self { process, folder: tempfile::tempdir().unwrap() }
        }

        fn identity(&self) -> Identity {
            process::identity(self.process.id()).unwrap()
        }

        /// Writes the figures file of the instance with the index `copy`, in which the process has the name `name`. Returns
        /// the paths of the files of the instances from 0 to `copy`.
        fn publish(&self, name: &str, copy: u32) -> ProcessFiles {
            let identity = self.identity();
            let mut page = vec![0; stats::Figures::LEN];
            page[..8].copy_from_slice(b"pagemill");
            page[8..12].copy_from_slice(&stats::VERSION.to_le_bytes());
            page[12..16].copy_from_slice(&identity.pid.to_le_bytes());
            page[16..24].copy_from_slice(&identity.start_ticks.to_le_bytes());
            page[24..24 + name.len()].copy_from_slice(name.as_bytes());
            let path =
                |copy| super::super::file_of_instance(self.folder.path().to_str().unwrap(), identity, copy).unwrap();
            std::fs::write(path(copy).as_str(), page).unwrap();
            let paths = (0..=copy).map(path).collect();
            ProcessFiles { identity, user: process::user_id(), run: None, paths }
        }

        fn end(&mut self) {
            drop(self.process.stdin.take());
            self.process.wait().unwrap();
        }
    }

    impl Drop for TestProcess {
        fn drop(&mut self) {
            self.end();
        }
    }

    fn follow(files: ProcessFiles) -> Followed {
        Followed { files, trusted_at: None, stat: None, figures: Vec::new() }
    }

    fn names(reading: Option<Reading>) -> Vec<String> {
        let found = reading.and_then(|reading| reading.process).map(|process| process.found).unwrap_or_default();
        found.iter().map(|(_, snapshot)| snapshot.name()).collect()
    }

    /// The files of a process must stay open only if that is allowed, and be closed when it has ended.
    #[test]
    fn files_stay_open_until_the_process_ends() {
        let mut process = TestProcess::new();
        let mut followed = follow(process.publish("first", 0));
        assert_eq!((names(followed.read(false)), followed.open_descriptors()), (vec!["first".to_owned()], 0));
        for _ in 0..2 {
            assert_eq!((names(followed.read(true)), followed.open_descriptors()), (vec!["first".to_owned()], 2));
        }
        process.end();
        assert!(followed.read(true).is_none());
        assert_eq!(followed.open_descriptors(), 0);
    }

    /// A file is updated, then removed and created again, then a second file appears. Each time the process is read
    /// after the files were listed again, and the reading must have the present contents of all files.
    #[test]
    fn replaced_and_new_files_are_read() {
        let process = TestProcess::new();
        let mut followed = follow(process.publish("first", 0));
        assert_eq!(names(followed.read(true)), ["first"]);
        // Writes to the existing file.
        followed = followed.with_files(process.publish("second", 0));
        assert_eq!((names(followed.read(true)), followed.open_descriptors()), (vec!["second".to_owned()], 2));
        std::fs::remove_file(followed.files.paths[0].as_str()).unwrap();
        followed = followed.with_files(process.publish("third", 0));
        assert_eq!(names(followed.read(true)), ["third"]);
        followed = followed.with_files(process.publish("fourth", 1));
        assert_eq!(
            (names(followed.read(true)), followed.open_descriptors()),
            (vec!["third".into(), "fourth".into()], 3)
        );
    }

    /// A file with the identity of another process, and files of an ended process with the same id, must not be returned.
    #[test]
    fn figures_of_other_processes_are_left_out() {
        let (process, other) = (TestProcess::new(), TestProcess::new());
        let paths = other.publish("other", 0).paths;
        let mut followed = follow(ProcessFiles { paths, ..process.publish("own", 0) });
        assert!(followed.read(true).is_some_and(|reading| reading.process.is_none()));
        let mut ended = process.publish("own", 0);
        ended.identity.start_ticks += 1;
        assert!(follow(ended).read(true).is_none());
    }
}
