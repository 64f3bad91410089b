//! `pagemill docker-plugin`, used by a client of its own that sends Docker's requests.

mod common;

use common::ram::wait_until;
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, may_mount, shell};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

/// A plugin for one test. Dropping the value unmounts its volumes.
struct Plugin {
    place: TestFolder,
    guard: Guard,
}

impl Plugin {
    /// Starts a plugin. Returns `None`, with a message, if this process may not mount.
    fn new() -> Option<Self> {
        if !may_mount() {
            return None;
        }
        let place = TestFolder::new();
        let guard = start(&place);
        Some(Self { place, guard })
    }

    fn dir(&self) -> PathBuf {
        self.place.path("volumes")
    }

    fn socket(&self) -> PathBuf {
        self.place.path("plugins/pagemill.sock")
    }

    fn point(&self, name: &str) -> PathBuf {
        fs::canonicalize(self.dir()).unwrap().join(name).join("mount")
    }

    /// Kills the plugin, and starts another one.
    fn restart(&mut self) {
        self.kill();
        self.guard = start(&self.place);
    }

    fn kill(&mut self) {
        self.guard.signal("KILL");
        self.guard.wait(TIMEOUT);
    }

    fn send(&self, bytes: &[u8]) -> (String, String) {
        send_to(&self.socket(), bytes)
    }

    /// Sends a request, and returns its response, which must have status 200.
    fn call(&self, request: &str, fields: &Value) -> Value {
        call_at(&self.socket(), request, fields)
    }

    /// Sends a request that must succeed.
    #[track_caller]
    fn succeed(&self, request: &str, fields: &Value) -> Value {
        let answer = self.call(request, fields);
        assert_eq!(answer["Err"], "", "{request} {fields}: {answer}");
        answer
    }

    /// Sends a request that must fail. Returns the text of the error.
    #[track_caller]
    fn fail(&self, request: &str, fields: &Value) -> String {
        let answer = self.call(request, fields);
        let text = answer["Err"].as_str().unwrap().to_owned();
        assert!(!text.is_empty(), "{request} {fields}: {answer}");
        text
    }

    fn names(&self) -> Vec<String> {
        let answer = self.succeed("VolumeDriver.List", &json!({}));
        answer["Volumes"].as_array().unwrap().iter().map(|it| it["Name"].as_str().unwrap().to_owned()).collect()
    }

    fn status(&self, name: &str) -> Value {
        self.succeed("VolumeDriver.Get", &json!({ "Name": name }))["Volume"]["Status"].clone()
    }

    fn is_mounted(&self, name: &str) -> bool {
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).unwrap_or(0);
        self.point(name).exists() && device(&self.point(name)) != device(&self.dir())
    }

    fn controller(&self, name: &str) -> Option<u64> {
        let mut command = self.place.command(PAGEMILL);
        command.args(["status", "--json"]).arg(self.point(name));
        serde_json::from_str::<Value>(&finish(command, TIMEOUT).out).ok()?["controller_pid"].as_u64()
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if !self.guard.has_ended() {
            self.kill();
        }
        for folder in fs::read_dir(self.dir()).into_iter().flatten().flatten() {
            let point = folder.path().join("mount");
            if point.is_dir() {
                let point = point.display();
                shell(&format!("{PAGEMILL} umount {point} 2>/dev/null >&2 || umount -l {point} 2>/dev/null"));
            }
        }
    }
}

fn command(place: &TestFolder) -> Command {
    command_with(place, "volumes", "plugins/pagemill.sock")
}

fn command_with(place: &TestFolder, dir: &str, socket: &str) -> Command {
    let mut command = place.command(PAGEMILL);
    command.arg("docker-plugin").arg("--dir").arg(place.path(dir)).arg("--socket").arg(place.path(socket));
    command
}

fn start(place: &TestFolder) -> Guard {
    let mut command = command(place);
    command.stdout(File::create(place.path("out")).unwrap());
    command.stderr(File::create(place.path("err")).unwrap());
    let mut guard = Guard::new(command);
    wait_until("the plugin serves", || {
        assert!(!guard.has_ended(), "{}", fs::read_to_string(place.path("err")).unwrap());
        fs::read_to_string(place.path("out")).unwrap().contains('\n')
    });
    guard
}

/// Sends bytes, and returns the status and the body of the response.
fn send_to(socket: &Path, bytes: &[u8]) -> (String, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    // The server may answer, and close the connection, before it has read everything.
    let _ = stream.write_all(bytes);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned())
}

fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn call_at(socket: &Path, request: &str, fields: &Value) -> Value {
    let (status, body) = send_to(socket, &post(&format!("/{request}"), fields.to_string().as_bytes()));
    assert_eq!(status, "200", "{request} {fields}: {body}");
    serde_json::from_str(&body).unwrap()
}

/// A volume is created, used by two containers and removed. Its options must have an effect. It must not be removed
/// while a container uses it, and its files must stay until then.
#[test]
fn a_volume_lives_from_create_to_remove() {
    let Some(mut plugin) = Plugin::new() else { return };
    assert_eq!(plugin.call("Plugin.Activate", &json!({})), json!({ "Implements": ["VolumeDriver"] }));
    assert_eq!(plugin.send(&post("/Plugin.Activate", b"")).0, "200", "Docker sends no body");
    let capabilities = plugin.call("VolumeDriver.Capabilities", &json!({}));
    assert_eq!(capabilities["Capabilities"]["Scope"], "local");
    assert_eq!(fs::metadata(plugin.socket()).unwrap().permissions().mode() & 0o777, 0o600);

    let options = json!({ "size": "32M", "mode": "0755", "volatile": "full", "huge": "never" });
    plugin.succeed("VolumeDriver.Create", &json!({ "Name": "cache", "Opts": options }));
    plugin.succeed("VolumeDriver.Create", &json!({ "Name": "plain", "Opts": null }));
    let again =
        json!({ "Name": "cache", "Opts": { "size": "32 MiB", "mode": "755", "volatile": "full", "huge": "never" } });
    plugin.succeed("VolumeDriver.Create", &again);
    let error = plugin.fail("VolumeDriver.Create", &json!({ "Name": "cache", "Opts": { "size": "64M" } }));
    assert!(error.contains("size=32M") && error.contains("size=64M"), "{error}");
    assert_eq!(plugin.names(), ["cache", "plain"]);
    assert!(plugin.is_mounted("cache") && plugin.is_mounted("plain"));
    assert_eq!(fs::metadata(plugin.point("cache")).unwrap().permissions().mode() & 0o7777, 0o755);
    let mut mark = plugin.place.command(PAGEMILL);
    mark.args(["mark", "--json"]).arg(plugin.point("cache"));
    let marks: Value = serde_json::from_str(&finish(mark, TIMEOUT).out).unwrap();
    assert_eq!((&marks["own_volatile"], &marks["own_huge"]), (&json!("full"), &json!("never")));

    for id in ["first", "second", "second"] {
        let answer = plugin.succeed("VolumeDriver.Mount", &json!({ "Name": "cache", "ID": id }));
        assert_eq!(answer["Mountpoint"], plugin.point("cache").to_str().unwrap());
    }
    fs::write(plugin.point("cache").join("file"), vec![1; 1 << 20]).unwrap();
    let status = plugin.status("cache");
    assert_eq!((&status["size"], &status["containers"]), (&json!("32 MiB"), &json!(2)), "{status}");
    assert!(status["used"].as_str().unwrap().starts_with("1 MiB"), "{status}");
    let path = plugin.succeed("VolumeDriver.Path", &json!({ "Name": "cache" }));
    assert_eq!(path["Mountpoint"], plugin.point("cache").to_str().unwrap());

    let error = plugin.fail("VolumeDriver.Remove", &json!({ "Name": "cache" }));
    assert!(error.contains("in use; containers: 2"), "{error}");
    for id in ["first", "first", "never seen"] {
        plugin.succeed("VolumeDriver.Unmount", &json!({ "Name": "cache", "ID": id }));
    }
    let error = plugin.fail("VolumeDriver.Remove", &json!({ "Name": "cache" }));
    assert!(error.contains("in use; containers: 1 (if none of them runs: pagemill umount /"), "{error}");
    plugin.succeed("VolumeDriver.Unmount", &json!({ "Name": "cache", "ID": "second" }));
    // A process that works in the volume blocks the removal as well, and is named.
    let open = File::open(plugin.point("cache").join("file")).unwrap();
    let error = plugin.fail("VolumeDriver.Remove", &json!({ "Name": "cache" }));
    assert!(error.contains("is busy") && error.contains(&format!("process {}", std::process::id())), "{error}");
    drop(open);
    assert_eq!(fs::metadata(plugin.point("cache").join("file")).unwrap().len(), 1 << 20);
    plugin.succeed("VolumeDriver.Remove", &json!({ "Name": "cache" }));
    assert!(!plugin.dir().join("cache").exists() && plugin.names() == ["plain"]);
    assert!(plugin.fail("VolumeDriver.Remove", &json!({ "Name": "cache" })).contains("there is no volume `cache`"));

    plugin.guard.signal("TERM");
    assert!(plugin.guard.wait(TIMEOUT).success());
    assert!(!plugin.socket().exists() && plugin.is_mounted("plain"));
}

/// Requests that are wrong in many ways must be refused with a text, and change nothing.
#[test]
fn wrong_requests_change_nothing() {
    let Some(plugin) = Plugin::new() else { return };
    for name in ["", ".", "..", "../../etc", "/etc", "a/b", ".lock", "a\0b", "a\nb", "-rf", "ü", &"n".repeat(256)] {
        for request in ["Create", "Mount", "Unmount", "Remove", "Path", "Get"] {
            plugin.fail(&format!("VolumeDriver.{request}"), &json!({ "Name": name, "ID": "x" }));
        }
    }
    let create = |options: Value| plugin.fail("VolumeDriver.Create", &json!({ "Name": "a", "Opts": options }));
    assert!(create(json!({ "sise": "1G" })).contains("option sise=1G: a volume has no such option"));
    assert!(create(json!({ "size": "much" })).contains("'much' is not a size"));
    assert!(create(json!({ "size": "0" })).contains("a size of 0"));
    assert!(create(json!({ "size": "1000T" })).contains("1000 TiB is beyond the machine's memory"));
    assert!(create(json!({ "mode": "888" })).contains("octal"));
    assert!(create(json!({ "volatile": "maybe" })).contains("none, partial, full"));
    assert!(create(json!({ "huge": "yes" })).contains("auto, always, never"));

    let status = |bytes: &[u8]| plugin.send(bytes).0;
    let to_create = |body: &[u8]| status(&post("/VolumeDriver.Create", body));
    for body in
        [&b"{"[..], b"[1]", b"\xff\xfe", b"{\"Name\": 1}", b"{\"Name\": \"a\", \"Opts\": {\"size\": 1}}", b"null"]
    {
        assert_eq!(to_create(body), "400", "{}", String::from_utf8_lossy(body));
    }
    assert_eq!(to_create("[".repeat(60_000).as_bytes()), "400");
    assert_eq!(to_create(&vec![b' '; (64 << 10) + 1]), "413");
    assert_eq!(status(b"POST /VolumeDriver.Create HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n"), "413");
    assert_eq!(status(b"POST /VolumeDriver.Create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), "411");
    assert_eq!(status(b"GET /VolumeDriver.List HTTP/1.1\r\n\r\n"), "405");
    assert_eq!(status(&post("/VolumeDriver.Format", b"{}")), "404");
    assert_eq!(status(&post("/../VolumeDriver.List", b"{}")), "404");
    assert_eq!(status(b"\x16\x03\x01\x02\x00\r\n\r\n"), "400");
    // A request that ends in its middle is not executed.
    let half = post("/VolumeDriver.Create", b"{\"Name\": \"half\"}");
    drop(UnixStream::connect(plugin.socket()).unwrap().write_all(&half[..half.len() - 2]));

    plugin.succeed("VolumeDriver.Create", &json!({ "Name": "a", "Opts": { "size": "8M" } }));
    assert!(plugin.fail("VolumeDriver.Mount", &json!({ "Name": "a" })).contains("no ID"));
    assert!(plugin.fail("VolumeDriver.Mount", &json!({ "Name": "a", "ID": "i".repeat(257) })).contains("257 bytes"));
    assert_eq!((plugin.names(), &plugin.status("a")["containers"]), (vec!["a".to_owned()], &json!(0)));
    plugin.succeed("VolumeDriver.Remove", &json!({ "Name": "a" }));
    let left: Vec<_> = fs::read_dir(plugin.dir()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"]);
}

/// Many clients create, mount, unmount and remove the same volumes at the same time. No use may get lost, and each
/// volume must be removed exactly once.
#[test]
fn concurrent_requests_lose_nothing() {
    const CLIENTS: usize = 16;
    let Some(plugin) = Plugin::new() else { return };
    let socket = plugin.socket();
    let each_client = |work: &(dyn Fn(usize) + Sync)| {
        thread::scope(|scope| (0..CLIENTS).for_each(|client| drop(scope.spawn(move || work(client)))));
    };
    let succeed = |request: &str, fields: Value| assert_eq!(call_at(&socket, request, &fields)["Err"], "", "{fields}");
    each_client(&|client| {
        for name in ["a", "b"] {
            succeed("VolumeDriver.Create", json!({ "Name": name, "Opts": { "size": "16M" } }));
            succeed("VolumeDriver.Mount", json!({ "Name": name, "ID": format!("container-{client}") }));
        }
        fs::write(plugin.point("a").join(format!("{client}")), "x").unwrap();
    });
    assert_eq!(fs::read_dir(plugin.point("a")).unwrap().count(), CLIENTS);
    assert_eq!([&plugin.status("a")["containers"], &plugin.status("b")["containers"]], [&json!(CLIENTS); 2]);
    let removed = AtomicUsize::new(0);
    each_client(&|client| {
        for name in ["a", "b"] {
            succeed("VolumeDriver.Unmount", json!({ "Name": name, "ID": format!("container-{client}") }));
            let answer = call_at(&socket, "VolumeDriver.Remove", &json!({ "Name": name }));
            removed.fetch_add(usize::from(answer["Err"] == ""), Relaxed);
        }
    });
    assert_eq!((removed.into_inner(), plugin.names().len()), (2, 0));
}

/// The plugin is killed and started again: it must list its volumes with their files and containers. It must replace
/// controllers that were killed, forget the containers of volumes that are not mounted, remove folders of volumes that
/// were not complete, and leave other folders.
#[test]
fn volumes_outlive_the_plugin() {
    let Some(mut plugin) = Plugin::new() else { return };
    for name in ["kept", "orphan", "gone"] {
        plugin.succeed("VolumeDriver.Create", &json!({ "Name": name, "Opts": { "size": "16M" } }));
        plugin.succeed("VolumeDriver.Mount", &json!({ "Name": name, "ID": "container" }));
        fs::write(plugin.point(name).join("file"), name).unwrap();
    }
    // A second plugin must not disturb the first one.
    let [other_dir, other_socket] = [("other", "plugins/pagemill.sock"), ("volumes", "other.sock")];
    for ((dir, socket), why) in [(other_dir, "another process serves"), (other_socket, "another plugin uses")] {
        let end = finish(command_with(&plugin.place, dir, socket), TIMEOUT);
        assert!(end.code() == 2 && end.err.contains(why), "{}", end.err);
    }
    plugin.kill();
    assert!(fs::symlink_metadata(plugin.socket()).unwrap().file_type().is_socket());
    let before = plugin.controller("orphan").unwrap();
    assert!(shell(&format!("kill -s KILL {before}")).success());
    common::await_end_of(&before.to_string());
    let mut umount = plugin.place.command(PAGEMILL);
    umount.arg("umount").arg(plugin.point("gone"));
    finish(umount, TIMEOUT).assert_success();
    fs::create_dir_all(plugin.dir().join("half/mount")).unwrap();
    fs::create_dir(plugin.dir().join("foreign")).unwrap();
    fs::write(plugin.dir().join("foreign/file"), "x").unwrap();
    fs::create_dir(plugin.dir().join("broken")).unwrap();
    fs::write(plugin.dir().join("broken/volume.json"), "{").unwrap();
    plugin.guard = start(&plugin.place);

    assert_eq!(plugin.names(), ["gone", "kept", "orphan"]);
    for name in ["kept", "orphan"] {
        assert_eq!(fs::read_to_string(plugin.point(name).join("file")).unwrap(), name);
        assert!(plugin.fail("VolumeDriver.Remove", &json!({ "Name": name })).contains("is in use; containers: 1 "));
    }
    assert!(plugin.controller("orphan").is_some_and(|controller| controller != before));
    assert!(!plugin.is_mounted("gone") && plugin.status("gone")["containers"] == Value::Null);
    plugin.succeed("VolumeDriver.Mount", &json!({ "Name": "gone", "ID": "new" }));
    assert!(plugin.is_mounted("gone") && plugin.status("gone")["containers"] == 1);
    assert_eq!(fs::read_dir(plugin.point("gone")).unwrap().count(), 0);
    assert!(!plugin.dir().join("half").exists());
    let messages = fs::read_to_string(plugin.place.path("err")).unwrap();
    for name in ["foreign", "broken"] {
        assert!(messages.contains(&format!("/{name} is left alone")), "{messages}");
        assert!(plugin.dir().join(name).read_dir().unwrap().count() == 1);
        plugin.fail("VolumeDriver.Create", &json!({ "Name": name }));
    }

    plugin.restart();
    assert_eq!(plugin.status("gone")["containers"], 1);
    // A plugin that runs notices that a controller was killed, also without a request.
    let before = plugin.controller("kept").unwrap();
    assert!(shell(&format!("kill -s KILL {before}")).success());
    common::await_end_of(&before.to_string());
    wait_until("there is another controller", || plugin.controller("kept").is_some_and(|now| now != before));
    for (name, id) in [("kept", "container"), ("orphan", "container"), ("gone", "new")] {
        plugin.succeed("VolumeDriver.Unmount", &json!({ "Name": name, "ID": id }));
        plugin.succeed("VolumeDriver.Remove", &json!({ "Name": name }));
    }
    assert_eq!(plugin.names().len(), 0);
}

/// The program in docs/docker.md must get all its batches through a volume that is mounted on `/dev/shm`, and leave no
/// file there.
#[test]
fn data_loaders_use_a_volume_as_shared_memory() {
    if common::is_missing("python3") {
        return;
    }
    let Some(plugin) = Plugin::new() else { return };
    let docs = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/docker.md")).unwrap();
    let (_, program) = docs.split_once("```python\n").unwrap();
    fs::write(plugin.place.path("loader.py"), program.split_once("```").unwrap().0).unwrap();
    plugin.succeed("VolumeDriver.Create", &json!({ "Name": "shm", "Opts": { "size": "512M" } }));
    plugin.succeed("VolumeDriver.Mount", &json!({ "Name": "shm", "ID": "loader" }));
    let mut command = plugin.place.command("unshare");
    let script = format!("mount --bind {} /dev/shm && exec python3 loader.py", plugin.point("shm").display());
    command.args(["-m", "sh", "-c", &script]);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert_eq!(end.out, "12 batches\n", "{}", end.err);
    assert_eq!(fs::read_dir(plugin.point("shm")).unwrap().count(), 0);
}

/// Without privileges, and at a path that is not a socket, the plugin must end with a message.
#[test]
fn a_plugin_that_cannot_serve_says_why() {
    let place = TestFolder::new();
    fs::create_dir(place.path("plugins")).unwrap();
    fs::write(place.path("plugins/pagemill.sock"), "x").unwrap();
    let end = finish(command(&place), TIMEOUT);
    assert_eq!(end.code(), 2);
    let reasons = ["exists, and is not a socket", "needs root privileges"];
    assert!(end.err.contains(reasons[usize::from(!common::is_root())]), "{}", end.err);
    assert_eq!(fs::read(place.path("plugins/pagemill.sock")).unwrap(), b"x");
}
