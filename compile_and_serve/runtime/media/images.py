"""Images from files, PIL and arrays, as RGB. Pillow is an extra: without it, a sentence names it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.pixels import pixel_library
from compile_and_serve.runtime.media.prepared import MediaError, content_key

Image = Any  # a PIL.Image.Image; Pillow may not be installed

MAX_PIXELS = 1 << 26  # of a decoded image: 64 million pixels are 200 MB
MISSING = 'Images need the extra "vision": pip install "compile-and-serve[vision]".'
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_TOO_LARGE = "{} is too large: " + f"{MAX_PIXELS} pixels are the limit."
_WHITE = (255, 255, 255)
_ORIENTATION = 0x0112  # the EXIF tag


def pillow() -> Any:
    """The package PIL.Image. Raises `MediaError` without it."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise MediaError(MISSING) from None
    return PIL.Image


def decode_image(data: bytes) -> Image:
    """The image in a file's bytes, as RGB, turned as its EXIF data say; of an animation, the first frame. Raises `MediaError`."""
    image = pillow()
    try:
        with image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _check_size(opened.size)
            opened.load()
            made = _rgb(opened)
            return opened.copy() if made is opened else made  # which does not hold the file
    except MediaError:
        raise
    except image.UnidentifiedImageError:
        raise MediaError(f"The data are no image that can be read: expected one of {', '.join(_FORMATS)}.") from None
    except image.DecompressionBombError:
        raise MediaError(_TOO_LARGE.format("The image")) from None
    except Exception as error:  # a decoder may raise anything on a damaged file
        raise MediaError(f"The image cannot be decoded: {str(error) or type(error).__name__:.200}.") from None


def as_image(given: Any) -> Image:
    """A PIL image or an array, uint8 [height, width] or [height, width, channels], as RGB. Raises `MediaError`."""
    image = pillow()
    if isinstance(given, image.Image):
        _check_size(given.size)
        return _rgb(given)
    if hasattr(given, "numpy"):  # a tensor
        given = given.numpy()
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim not in (2, 3) or (given.ndim == 3 and given.shape[2] not in (1, 3, 4)) or not given.size:
            raise MediaError(
                f"An array of an image must be uint8 [height, width] or [height, width, 1, 3 or 4], got {given.dtype} {list(given.shape)}."
            )
        pixels = given[:, :, 0] if given.ndim == 3 and given.shape[2] == 1 else given
        _check_size((pixels.shape[1], pixels.shape[0]))
        return _rgb(image.fromarray(np.ascontiguousarray(pixels)))
    raise MediaError(f"An image must be a PIL image or an array of uint8, got a {type(given).__name__}.")


def pixels_key(image: Image, settings: str) -> bytes:
    """The key of an image's pixels."""
    return content_key("pixels", str(image.size), image.tobytes(), settings)


def resize(image: Image, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3], by bicubic interpolation."""
    if image.size != (width, height):
        library = pixel_library()
        if library is not None and image.mode == "RGB" and library.resizes(image.size, (width, height)):
            return library.resize(np.asarray(image), width, height)
        image = image.resize((width, height), pillow().Resampling.BICUBIC)
    return np.asarray(image)


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise MediaError(_TOO_LARGE.format(f"An image of {width} × {height} pixels"))


def _rgb(opened: Image) -> Image:
    """Turned as EXIF says; what is transparent becomes white. The image itself, where nothing is to be done."""
    from PIL import ImageOps

    turned = opened if opened.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(opened)
    if turned.mode.startswith("I;16") or turned.mode in ("I", "F"):  # more than 8 bits
        turned = _eight_bits(turned)
    if turned.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in turned.info:
        whole = turned.convert("RGBA")
        white = pillow().new("RGBA", whole.size, (*_WHITE, 255))
        return pillow().alpha_composite(white, whole).convert("RGB")
    return turned if turned.mode == "RGB" else turned.convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Grey values of 16 bits scaled to 8. Pillow itself would clip them."""
    values = np.asarray(image).astype(np.float32)
    top = 65535.0 if values.max(initial=0) > 255 else 255.0
    return pillow().fromarray((np.clip(values, 0, top) * (255.0 / top)).round().astype(np.uint8))
