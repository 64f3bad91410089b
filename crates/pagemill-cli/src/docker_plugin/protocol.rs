//! Docker's volume plugin protocol, version 1: requests and responses as JSON in the bodies of HTTP.
//!
//! Source: docs.docker.com/engine/extend/plugins_volume.

use super::volumes::{Volume, Volumes};
use crate::http::{Request, Response};
use pagemill_core::units::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const CONTENT_TYPE: &str = "application/vnd.docker.plugins.v1.2+json";

/// The fields of all requests. Docker sends those that a request needs.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Fields {
    name: String,
    /// Identifies the container that mounts or unmounts.
    #[serde(rename = "ID")]
    id: String,
    opts: Option<BTreeMap<String, String>>,
}

/// Does the work of a request, and returns the response.
///
/// An error of a volume is in the field `Err` of a response with status 200, as the protocol demands. What is no
/// request of the protocol gets another status.
pub fn respond(volumes: &Volumes, request: &Request) -> Response {
    if request.method != "POST" {
        return Response { headers: "Allow: POST\r\n", ..refuse("405 Method Not Allowed", "the method is POST") };
    }
    let fields = if request.body.is_empty() { Ok(Fields::default()) } else { serde_json::from_slice(&request.body) };
    let fields = match fields {
        Ok(fields) => fields,
        Err(error) => return refuse("400 Bad Request", &format!("the body is not a request in JSON: {error}")),
    };
    match answer(volumes, &request.path, &fields) {
        Some(Ok(answer)) => reply("200 OK", &answer),
        Some(Err(why)) => refuse("200 OK", &why),
        None => refuse("404 Not Found", &format!("the protocol has no request `{}`", request.path.escape_debug())),
    }
}

/// Does the work of the request with this path. Returns `None` if the protocol has no such request.
fn answer(volumes: &Volumes, path: &str, fields: &Fields) -> Option<Result<Value, String>> {
    let done = |()| json!({ "Err": "" });
    Some(match path {
        "/Plugin.Activate" => Ok(json!({ "Implements": ["VolumeDriver"] })),
        // A volume is in the memory of one machine.
        "/VolumeDriver.Capabilities" => Ok(json!({ "Capabilities": { "Scope": "local" } })),
        "/VolumeDriver.Create" => {
            volumes.create(&fields.name, fields.opts.as_ref().unwrap_or(&BTreeMap::new())).map(done)
        }
        "/VolumeDriver.Remove" => volumes.remove(&fields.name).map(done),
        "/VolumeDriver.Mount" => {
            let point = volumes.mount(&fields.name, &fields.id);
            point.map(|point| json!({ "Mountpoint": point.to_string_lossy(), "Err": "" }))
        }
        "/VolumeDriver.Unmount" => volumes.unmount(&fields.name, &fields.id).map(done),
        "/VolumeDriver.Path" => {
            volumes.get(&fields.name).map(|volume| json!({ "Mountpoint": mount_point(&volume), "Err": "" }))
        }
        "/VolumeDriver.Get" => {
            volumes.get(&fields.name).map(|volume| json!({ "Volume": describe(&volume), "Err": "" }))
        }
        "/VolumeDriver.List" => {
            volumes.list().map(|all| json!({ "Volumes": all.iter().map(describe).collect::<Vec<_>>(), "Err": "" }))
        }
        _ => return None,
    })
}

fn refuse(status: &'static str, why: &str) -> Response {
    reply(status, &json!({ "Err": why }))
}

fn reply(status: &'static str, body: &Value) -> Response {
    Response { status, content_type: CONTENT_TYPE, headers: "", body: format!("{body}\n") }
}

/// Returns the mount point; an empty text if the volume is not mounted.
fn mount_point(volume: &Volume) -> String {
    volume.mounted.as_ref().map_or_else(String::new, |mounted| mounted.point.to_string_lossy().into_owned())
}

/// Returns the fields of a volume. `docker volume inspect` shows those of `Status`.
fn describe(volume: &Volume) -> Value {
    let status = match &volume.mounted {
        Some(mounted) => json!({
            "containers": volume.containers,
            "size": Bytes(mounted.size_bytes).to_string(),
            "used": Bytes(mounted.used_bytes).to_string(),
        }),
        None => json!({ "mounted": "no: the volume has no files; the next container gets it empty" }),
    };
    json!({ "Name": volume.name, "Mountpoint": mount_point(volume), "Status": status })
}
