//! The build directory that all clones of the repository share.
//!
//! Cargo considers a file unchanged if it is not newer than what was built from it. In a fresh clone every file is newer, so
//! Cargo would compile everything again. In a clone that is older than the last build it would compile nothing, even if the
//! content differs. Therefore [`SharedBuild::enter`] gives each file the modification time at which its content was first built
//! in the directory. What is built is then keyed by content, and a fresh clone compiles only what differs.
//!
//! A file that was written since then gets the current time, even if it changed back, because its other content may have been
//! built. The same holds for a file that the previous clone has written since then: it may have been edited while it was built.
//! Where a time goes back, the clone's own `target` folder forgets what it has built of our packages.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Holds the shared build directory for one clone. Other processes of the same clone can hold it, too.
#[derive(Debug)]
pub struct SharedBuild {
    folder: PathBuf,
    /// The lock is released when the file is closed.
    _lock: File,
}

/// The content hash of a file when it was last built, and the modification time that represents this content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    hash: u64,
    modified: SystemTime,
}

impl SharedBuild {
    /// Claims the directory for the clone at `root` and sets the modification times of its files. Returns `None` if the
    /// user has chosen a directory, or while another clone builds in it.
    pub fn enter(root: &Path) -> io::Result<Option<Self>> {
        let chosen = ["CARGO_BUILD_BUILD_DIR", "CARGO_TARGET_DIR"];
        if chosen.iter().any(|variable| env::var_os(variable).is_some()) {
            return Ok(None);
        }
        let home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let Some(home) = home.or_else(|| Some(env::home_dir()?.join(".cargo"))) else { return Ok(None) };
        let entered = Self::enter_in(home.join("haulout-build"), root, SystemTime::now())?;
        if entered.is_none() {
            eprintln!("note: another clone is building, so this clone builds in its own target folder");
        }
        Ok(entered)
    }

    fn enter_in(folder: PathBuf, root: &Path, now: SystemTime) -> io::Result<Option<Self>> {
        fs::create_dir_all(&folder).map_err(about(&folder))?;
        let claim = folder.join("clone");
        let open = File::options().read(true).write(true).create(true).truncate(false).open(&claim);
        let mut lock = open.map_err(about(&claim))?;
        let clone = identity(root)?;
        let mut previous = clone.clone();
        if lock.try_lock().is_ok() {
            previous = read_all(&lock)?;
            lock.set_len(0)?;
            lock.rewind()?;
            lock.write_all(&clone)?;
            lock.unlock()?;
        }
        // Another clone may have claimed the directory in the meantime, or may already hold it.
        lock.lock_shared()?;
        if read_all(&lock)? != clone {
            return Ok(None);
        }
        stamp(&folder.join("sources"), root, &root_of(&previous), now)?;
        Ok(Some(Self { folder, _lock: lock }))
    }

    /// Makes this command build in the directory.
    pub fn apply(&self, cargo: &mut Command) {
        cargo.env("CARGO_BUILD_BUILD_DIR", &self.folder);
    }
}

/// Adds the path to an error.
fn about(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn read_all(mut file: &File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut content)?;
    Ok(content)
}

/// Identifies a clone: its path, and when its folder was created, because another clone may have had the same path.
fn identity(root: &Path) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(root).map_err(about(root))?;
    let created = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let mut identity = root.as_os_str().as_encoded_bytes().to_vec();
    identity.extend(format!("\n{}", created.unwrap_or_default().as_nanos()).as_bytes());
    Ok(identity)
}

/// The root of the clone with this identity.
fn root_of(identity: &[u8]) -> PathBuf {
    let path = identity.split(|byte| *byte == b'\n').next().unwrap_or_default();
    OsStr::from_bytes(path).into()
}

/// Sets the modification times of all files of a clone, and records new contents. `previous` is the root of the clone that
/// was built last, which may be the same.
fn stamp(record: &Path, root: &Path, previous: &Path, now: SystemTime) -> io::Result<()> {
    let before = fs::read_to_string(record).map(|text| parse(&text)).unwrap_or_default();
    let mut after = BTreeMap::new();
    let (mut changed, mut moved_back, mut packages) = (Vec::new(), false, Vec::new());
    visit(root, &mut |path| {
        let content = match fs::read(path) {
            // It was deleted in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            content => content?,
        };
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        if path.ends_with("Cargo.toml") {
            packages.extend(package(&content));
        }
        let name = path.strip_prefix(root).unwrap_or(path).as_os_str().to_owned();
        let hash = hasher.finish();
        let modified = fs::metadata(path)?.modified()?;
        let is_current = |known: &Stamp| {
            let built = || fs::metadata(previous.join(&name)).and_then(|metadata| metadata.modified());
            known.hash == hash && built().is_ok_and(|modified| modified == known.modified)
        };
        let stamp = before.get(&name).copied().filter(is_current).unwrap_or(Stamp { hash, modified: now });
        if modified != stamp.modified {
            moved_back |= stamp.modified < modified;
            changed.push((path.to_owned(), stamp.modified));
        }
        after.insert(name, stamp);
        Ok(())
    })?;
    // First forget, then go back: a run that is interrupted in between causes a rebuild.
    if moved_back {
        forget_builds(&root.join("target"), &packages);
    }
    for (path, modified) in changed {
        File::open(&path).and_then(|file| file.set_modified(modified)).map_err(about(&path))?;
    }
    if before == after {
        return Ok(());
    }
    let unfinished = record.with_extension(std::process::id().to_string());
    fs::write(&unfinished, render(&after))?;
    fs::rename(&unfinished, record)
}

/// The name of the package that this manifest defines.
fn package(manifest: &[u8]) -> Option<String> {
    let manifest = String::from_utf8_lossy(manifest);
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.split('"').next())?;
    Some(name.to_owned())
}

/// Makes Cargo compile these packages again in a target folder. If there is nothing to remove, there is nothing to forget.
fn forget_builds(target: &Path, packages: &[String]) {
    let folders = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    // Builds are in `target/PROFILE`, and with `--target` in `target/TARGET/PROFILE`.
    let profiles = folders(target).flat_map(|entry| folders(&entry.path()).chain([entry]));
    for profile in profiles {
        for build in folders(&profile.path().join(".fingerprint")) {
            let name = build.file_name();
            let built = name.to_str().and_then(|name| Some(name.rsplit_once('-')?.0));
            if built.is_some_and(|built| packages.iter().any(|package| package == built)) {
                let _ = fs::remove_dir_all(build.path());
            }
        }
    }
}

/// Calls a function for every file that Cargo may compile.
fn visit(folder: &Path, file: &mut impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    for entry in fs::read_dir(folder).map_err(about(folder))? {
        let entry = entry.map_err(about(folder))?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && entry.file_name() != "target" && entry.file_name() != ".git" {
            visit(&path, file)?;
        } else if kind.is_file() {
            file(&path).map_err(about(&path))?;
        }
    }
    Ok(())
}

fn render(stamps: &BTreeMap<OsString, Stamp>) -> String {
    let line = |(name, stamp): (&OsString, &Stamp)| {
        let since = stamp.modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(format!("{} {} {} {}\n", stamp.hash, since.as_secs(), since.subsec_nanos(), name.to_str()?))
    };
    stamps.iter().filter_map(line).collect()
}

/// Skips invalid lines: their files are compiled again.
fn parse(text: &str) -> BTreeMap<OsString, Stamp> {
    let line = |line: &str| {
        let mut words = line.splitn(4, ' ');
        let hash = words.next()?.parse().ok()?;
        let modified = UNIX_EPOCH + Duration::new(words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((words.next()?.into(), Stamp { hash, modified }))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when the test ends.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            let folder = env::temp_dir().join(format!("haulout-launcher-{}-{name}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn clone_with(&self, name: &str, content: &str) -> PathBuf {
            let root = self.0.join(name);
            fs::create_dir_all(root.join("src")).unwrap();
            fs::write(root.join("src/main.rs"), content).unwrap();
            root
        }

        fn enter(&self, root: &Path, seconds: u64) -> Option<SharedBuild> {
            let now = UNIX_EPOCH + Duration::from_secs(seconds);
            SharedBuild::enter_in(self.0.join("build"), root, now).unwrap()
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn modified(root: &Path) -> u64 {
        let modified = fs::metadata(root.join("src/main.rs")).unwrap().modified().unwrap();
        modified.duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    #[test]
    fn modification_time_follows_the_content() {
        let temporary = Temporary::new("time");
        let (first, same) = (temporary.clone_with("first", "a"), temporary.clone_with("same", "a"));
        let other = temporary.clone_with("other", "b");
        let enter = |root: &Path, seconds| {
            temporary.enter(root, seconds).unwrap();
            modified(root)
        };
        assert_eq!(enter(&first, 100), 100);
        assert_eq!(enter(&same, 200), 100, "nothing has to be compiled");
        assert_eq!(enter(&other, 300), 300, "another content");
        assert_eq!(enter(&first, 400), 400, "the last build had other content");
        fs::write(first.join("src/main.rs"), "c").unwrap();
        assert_eq!(enter(&first, 500), 500, "the file has changed");
        assert_eq!(enter(&first, 600), 500);
        fs::write(first.join("src/main.rs"), "c").unwrap();
        assert_eq!(enter(&first, 700), 700, "other content may have been built in between");
    }

    #[test]
    fn own_target_folder_forgets_builds_when_a_time_goes_back() {
        let temporary = Temporary::new("forget");
        let (first, second) = (temporary.clone_with("first", "a"), temporary.clone_with("second", "a"));
        let built = ["web-0a1b", "serde-0a1b", "web-more-0a1b"];
        let folders = ["debug", "x86_64-unknown-linux-gnu/release"];
        let built = folders.map(|folder| {
            let builds = second.join("target").join(folder).join(".fingerprint");
            built.map(|name| builds.join(name))
        });
        for folder in built.as_flattened() {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(second.join("Cargo.toml"), "[package]\nname = \"web\"\n").unwrap();
        temporary.enter(&first, 100).unwrap();
        temporary.enter(&second, 200).unwrap();
        assert_eq!(built.map(|builds| builds.map(|build| build.exists())), [[false, true, true]; 2]);
    }

    #[test]
    fn files_edited_during_a_build_are_not_trusted() {
        let temporary = Temporary::new("edited");
        let (first, second) = (temporary.clone_with("first", "a"), temporary.clone_with("second", "a"));
        for (seconds, contents) in [(100, ["b", "b"]), (300, ["b", "a"])] {
            let held = temporary.enter(&first, seconds);
            for content in contents {
                fs::write(first.join("src/main.rs"), content).unwrap();
            }
            drop(held);
            temporary.enter(&second, seconds + 100).unwrap();
            assert_eq!(modified(&second), seconds + 100, "{contents:?}");
        }
        fs::remove_dir_all(&second).unwrap();
        let third = temporary.clone_with("third", "a");
        temporary.enter(&third, 500).unwrap();
        assert_eq!(modified(&third), 500, "nobody knows what was built");
    }

    #[test]
    fn one_clone_builds_at_a_time() {
        let temporary = Temporary::new("lock");
        let (first, second) = (temporary.clone_with("first", "a"), temporary.clone_with("second", "a"));
        let held = temporary.enter(&first, 100);
        assert!(held.is_some());
        assert!(temporary.enter(&first, 100).is_some(), "another process of the same clone");
        assert!(temporary.enter(&second, 100).is_none());
        drop(held);
        assert!(temporary.enter(&second, 100).is_some());
    }

    #[test]
    fn damaged_record_causes_a_full_rebuild() {
        let temporary = Temporary::new("damaged");
        let clone = temporary.clone_with("clone", "a");
        temporary.enter(&clone, 100).unwrap();
        fs::write(temporary.0.join("build/sources"), "nonsense\n1 2\n").unwrap();
        temporary.enter(&clone, 200).unwrap();
        assert_eq!(modified(&clone), 200);
    }
}
