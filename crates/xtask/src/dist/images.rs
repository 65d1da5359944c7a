//! Builds an image of each binary, with the built-in writer, or with a container engine and the `Containerfile`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use haulout_e2e::image::{Image, architecture};

use super::for_platform;
use crate::repo;

/// Maximum size of an image.
const LIMIT: u64 = 25 << 20;
/// Path of the binary in its image, as in the `Containerfile`.
const PROGRAM: &str = "/service";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Builder {
    /// Built-in writer, which needs no other program
    Own,
    /// `buildah` with the Containerfile
    Buildah,
    /// `docker buildx` with the Containerfile
    Docker,
}

pub fn build(services: &[&str], output: &Path, builder: Builder, repository: &str) -> Result<()> {
    for &service in services {
        let name = format!("{repository}/{service}:{}", env!("CARGO_PKG_VERSION"));
        let program = for_platform(service, "");
        let to = output.join(for_platform(service, ".oci.tar"));
        match builder {
            Builder::Own => {
                let bytes =
                    fs::read(output.join(&program)).with_context(|| format!("failed to read {program}"))?;
                Image { name: &name, path: PROGRAM, program: &bytes, args: &[] }
                    .write(architecture(), &to)?;
            }
            Builder::Buildah => {
                engine("buildah", &["build", "--timestamp=0", "--tag", &name], &program, output)?;
                let archive = format!("oci-archive:{}:{name}", to.display());
                run(Command::new("buildah").args(["push", &name, &archive]))?;
            }
            Builder::Docker => {
                let archive = format!("type=oci,rewrite-timestamp=true,name={name},dest={}", to.display());
                engine("docker", &["buildx", "build", "--output", &archive], &program, output)?;
            }
        }
        let size =
            fs::metadata(&to).with_context(|| format!("failed to read the size of {}", to.display()))?.len();
        if size > LIMIT {
            bail!("the image of {service} has {size} bytes, but the limit is {LIMIT}");
        }
    }
    Ok(())
}

/// Builds the image of one binary with a container engine.
fn engine(engine: &str, args: &[&str], program: &str, context: &Path) -> Result<()> {
    let mut command = Command::new(engine);
    command.args(args).args(["--build-arg", &format!("SERVICE={program}"), "--file"]);
    run(command.arg(repo::root().join("Containerfile")).arg(context).env("SOURCE_DATE_EPOCH", "0"))
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let status = command.status().with_context(|| format!("failed to run {program}: is it installed?"))?;
    if !status.success() {
        bail!("{program} failed with {status}: see above");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use haulout_e2e::image::USER;

    use super::*;

    #[test]
    fn containerfile_matches_the_builtin_writer() {
        let text = fs::read_to_string(repo::root().join("Containerfile")).unwrap();
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let ours = [
            "FROM scratch",
            "ARG SERVICE",
            &format!("COPY --chmod=0755 ${{SERVICE}} {PROGRAM}"),
            &format!("USER {USER}"),
            &format!("ENTRYPOINT [\"{PROGRAM}\"]"),
        ];
        assert_eq!(lines, ours);
    }
}
