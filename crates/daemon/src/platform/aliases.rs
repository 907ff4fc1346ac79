//! Looks for images that are one file with another, beside which there is a mark meanwhile.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backends::{Alias, MarkedFile};
use block::{Error, Result};
use futures::future::join_all;

use super::image_looks::ImageLooks;
use super::overlay_files;

/// See `Backends::sharing`. A place that does not answer keeps a thread, and nobody longer than a look may take.
pub(super) async fn sharing(looks: &ImageLooks, path: &Path, others: Vec<(PathBuf, bool)>) -> Option<PathBuf> {
    let is_device = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    let is_device_itself = match looks.look(path, is_device).await {
        Ok(is_device_itself) => is_device_itself,
        Err(error) => {
            tracing::warn!(error = error.chain(), "whether a place is another one's could not be found out in time");
            return None;
        }
    };
    let asked = others.into_iter().filter(|(other, is_locked)| {
        // Of a file of a volume no server is asked that need not be.
        is_device_itself || !is_locked || other.starts_with("/dev")
    });
    let asked = asked.map(|(other, is_locked)| async move {
        let path = path.to_owned();
        let look = move |other: &Path| {
            let is_meant = is_device_itself || !is_locked || is_device(other);
            is_meant && backends::share_bytes(&path, other)
        };
        match looks.look(&other, look).await {
            Ok(shares) => shares.then_some(other),
            Err(error) => {
                tracing::warn!(error = error.chain(), "whether it has another one's bytes could not be found out");
                None
            }
        }
    });
    join_all(asked).await.into_iter().flatten().next()
}

/// A mark that is removed by a thread of its own if nobody waits for that any more: its place may not answer.
struct Left(Option<Arc<MarkedFile>>);

impl Drop for Left {
    fn drop(&mut self) {
        let Some(marked) = self.0.take() else { return };
        drop(tokio::task::spawn_blocking(move || marked.unmark()));
    }
}

/// See `Backends::alias_of`. An image that does not answer counts as one that may be the file.
pub(super) async fn find(
    looks: &ImageLooks,
    path: &Path,
    images: Vec<PathBuf>,
    mark_name: String,
) -> Result<Option<(PathBuf, Alias)>> {
    let looking =
        |error: Error| Error::new(error.kind(), format!("looking at {}: {}", path.display(), error.context()));
    let behind = join_all(images.iter().map(|image| looks.look(image, backends::files_behind))).await;
    let asked = images.into_iter().zip(behind).flat_map(|(image, behind)| {
        // One that does not answer is asked by its own name, and found silent.
        let behind = behind.unwrap_or_else(|_| vec![image.clone()]);
        behind.into_iter().map(move |file| (image.clone(), file))
    });
    let asked: Vec<_> = asked.collect();
    let mut found = None;
    for file in looks.look(path, backends::files_behind).await.map_err(looking)? {
        match find_file(looks, &file, &asked, mark_name.clone()).await? {
            Some((image, Alias::Same)) => return Ok(Some((image, Alias::Same))),
            other => found = found.or(other),
        }
    }
    Ok(found)
}

/// The same of a file, and of images with the files that they show.
async fn find_file(
    looks: &ImageLooks,
    path: &Path,
    images: &[(PathBuf, PathBuf)],
    mark_name: String,
) -> Result<Option<(PathBuf, Alias)>> {
    let left = looks.look(path, move |path| MarkedFile::new(path, &mark_name).map(|marked| marked.map(Arc::new)));
    let looking = |error| Error::from_os(error, format!("looking at {}", path.display()));
    let Some(marked) = left.await?.map_err(looking)? else { return Ok(None) };
    let mut left = Left(Some(Arc::clone(&marked)));
    let asked = images.iter().map(|(_, file)| {
        let marked = Arc::clone(&marked);
        looks.look(file, move |image| marked.alias_of(image, &overlay_files::prefix_of(image)))
    });
    let asked: Vec<_> = asked.collect();
    drop(marked);
    let found = join_all(asked).await.into_iter().map(|alias| match alias {
        Ok(Ok(alias)) => alias,
        Ok(Err(_)) | Err(_) => Alias::Silent,
    });
    let mut found: Vec<(PathBuf, Alias)> = images.iter().map(|(image, _)| image.clone()).zip(found).collect();
    let marked = left.0.take();
    looks.look(path, move |_| marked.iter().for_each(|marked| marked.unmark())).await?;
    found.retain(|(_, alias)| *alias != Alias::Apart);
    // What is known comes before what is not.
    let at = found.iter().position(|(_, alias)| *alias == Alias::Same).unwrap_or(0);
    Ok((at < found.len()).then(|| found.swap_remove(at)))
}
