"""Where images come from: files of every kind, the parts held out, and one line for everything that is wrong."""

import gzip
import io
import shutil
import time

import numpy as np
import pytest

from siamese_jax.data import images as sources
from siamese_jax.data.image_set import with_classes_of
from siamese_jax.data.images import open_images, read_idx
from siamese_jax.errors import InputError

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (30, 5, 4, 1), dtype=np.uint8)
LABELS = (np.arange(30) % 3).astype(np.uint8)


def write_idx(path, array):
    header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """A folder like that of Debian's package, where the package is looked for."""
    for part, count in (("train", 30), ("t10k", 6)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", PIXELS[:count, :, :, 0])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", LABELS[:count])
    monkeypatch.setattr(sources, "FASHION_MNIST", tmp_path)
    return tmp_path


def refused(source, *words, split="train", **options):
    with pytest.raises(InputError) as caught:
        found = open_images(str(source), split, **options)
        found.example(0)
    assert "\n" not in str(caught.value)
    assert [word for word in words if str(word) not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("source", ["fashion_mnist", "quickstart"])
def test_fashion_mnist_is_read_from_its_package(fashion, source):
    train, test = (open_images(source, split) for split in ("train", "validation"))
    assert (len(train), len(test), train.num_classes, train.class_names[9]) == (30, 6, 10, "boot")
    image, label = train.example(7)
    np.testing.assert_array_equal(image, PIXELS[7])
    assert label == LABELS[7] and train.fingerprint != test.fingerprint
    assert train.fingerprint == open_images(source, "train").fingerprint
    elsewhere = open_images("fashion_mnist", "train", data_dir=str(fashion))
    assert elsewhere.fingerprint == train.fingerprint


def test_a_missing_or_broken_package_is_told(fashion, tmp_path):
    refused("fashion_mnist", tmp_path / "no", "apt-get install", "digits", data_dir=str(tmp_path / "no"))
    path = fashion / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    refused("fashion_mnist", path, "broken")
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-7]))
    refused("fashion_mnist", path, "cut off")
    path.write_bytes(gzip.compress(b"hello"))
    refused("fashion_mnist", path, "no IDX file")
    write_idx(path, PIXELS[:9, :, :, 0])
    refused("fashion_mnist", path, "(9, 5, 4)", "(30,)")


def test_idx_files_of_any_shape_are_read(tmp_path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz"), array)


def test_digits_stand_in_where_fashion_mnist_is_not(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sources, "FASHION_MNIST", tmp_path)
    train, test = (open_images("quickstart", split) for split in ("train", "validation"))
    assert train.name == "digits train" and (len(train), len(test)) == (1438, 359)
    image, _ = train.example(0)
    assert image.shape == (8, 8, 1) and image.dtype == np.uint8 and image.max() > 200


def test_an_npz_file_is_parted_by_a_hash_and_two_are_taken_as_they_are(tmp_path):
    np.savez(tmp_path / "a.npz", images=PIXELS, labels=LABELS, class_names=np.array(["x", "y", "z"]))
    train, held = (
        open_images(str(tmp_path / "a.npz"), s, validation_fraction=0.3) for s in ("train", "validation")
    )
    assert len(train) + len(held) == 30 and len(held) > 3 and train.class_names == ("x", "y", "z")
    both = {bytes(image.data) for part in (train, held) for image in part.images}
    assert len(both) == 30
    np.savez(tmp_path / "b.npz", images=PIXELS[:4], labels=np.array([0, 1, 2, 0]))
    pair = f"{tmp_path}/a.npz,{tmp_path}/b.npz"
    parts = [open_images(pair, s) for s in ("train", "validation")]
    assert [(len(part), part.class_names) for part in parts] == [(30, ("x", "y", "z")), (4, ("x", "y", "z"))]
    latents = PIXELS.astype(np.float64)
    np.savez(tmp_path / "l.npz", latents=latents, labels=LABELS.astype(int))
    found = open_images(str(tmp_path / "l.npz"), "train")
    assert found.example(0)[0].dtype == np.float32 and not found.shows_pixels and found.num_classes == 3


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": PIXELS}, ("has images", "and labels")),
        ({"images": PIXELS[..., 0], "labels": LABELS}, ("(30, 5, 4)", "(N, H, W, C)")),
        ({"images": PIXELS.astype(np.int32), "labels": LABELS}, ("int32",)),
        ({"images": PIXELS, "labels": LABELS[:9]}, ("9 labels for 30 images",)),
        ({"images": PIXELS, "labels": LABELS.astype(float)}, ("float64",)),
        ({"images": PIXELS, "labels": -LABELS.astype(int)}, ("from 0",)),
        ({"images": PIXELS[:0], "labels": LABELS[:0]}, ("no image",)),
        ({"images": PIXELS / 255, "labels": LABELS}, ("float64", "named latents")),
        ({"latents": PIXELS, "labels": LABELS}, ("latents are uint8", "floating")),
        ({"images": PIXELS, "labels": np.arange(30) + 2**30}, ("label 1073741853", "below 1000000")),
        ({"images": PIXELS, "labels": LABELS, "class_names": np.array("a")}, ("class_names of shape ()",)),
        ({"images": PIXELS, "labels": LABELS, "class_names": np.array(["a", "b", "a"])}, ("class_names",)),
        ({"images": PIXELS, "labels": LABELS, "class_names": np.array(["a"])}, ("label 2", "1 class_names")),
    ],
)
def test_a_wrong_npz_file_is_told(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    refused(tmp_path / "a.npz", *words)


def test_what_is_no_source_is_told(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "broken.npz", "cannot be read as a data.source (.npz)")
    refused("", "data.source is empty")
    refused("nowhere", "'nowhere'", "fashion_mnist, digits, tfds:NAME")
    refused("a.npz,b.npz,c.npz", "3 .npz files")
    with pytest.raises(InputError, match="unknown split 'test'"):
        open_images("digits", "test")
    np.savez(tmp_path / "one.npz", images=PIXELS[:1], labels=LABELS[:1])
    assert len(open_images(str(tmp_path / "one.npz"), "train")) == 1
    refused(tmp_path / "one.npz", "no image for validation", split="validation")


def test_a_source_without_parts_can_be_taken_whole(tmp_path, folder):
    np.savez(tmp_path / "a.npz", images=PIXELS, labels=LABELS)
    for source in (str(tmp_path / "a.npz"), str(folder)):
        for split in ("all", ""):
            found = open_images(source, split)
            assert (len(found), found.split) == (30, "all")
    refused("digits", "parts of its own", split="all")
    held = open_images("digits", "")
    assert held.split == "validation" and len(held) < 500


def test_classes_are_those_of_the_same_name(tmp_path):
    """A folder of two of a model's three classes would number them anew."""
    np.savez(tmp_path / "a.npz", images=PIXELS, labels=LABELS % 2, class_names=np.array(["dog", "fox"]))
    images = open_images(str(tmp_path / "a.npz"), "all")
    renamed = with_classes_of(images, ("cat", "dog", "fox"))
    assert renamed.num_classes == 3 and [renamed.example(i)[1] for i in range(4)] == [1, 2, 1, 1]
    np.testing.assert_array_equal(renamed.example(2)[0], PIXELS[2])
    assert with_classes_of(images, ()) is images and with_classes_of(images, ("0", "1")) is images
    with pytest.raises(InputError, match="the class 'dog', the model was trained on cat, fox: rename"):
        with_classes_of(images, ("cat", "fox"))


@pytest.fixture
def folder(tmp_path):
    """FOLDER/CLASS/*.png, some grey, some in colour, one with an alpha channel."""
    image = pytest.importorskip("PIL.Image")
    for i in range(30):
        place = tmp_path / "set" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.repeat(PIXELS[i], 3, axis=-1) if i % 3 else PIXELS[i, ..., 0]
        image.fromarray(pixels).save(place / f"{i:02}.png")
    return tmp_path / "set"


def test_a_folder_of_classes_is_parted_by_file_name(folder):
    train, held = (open_images(str(folder), s, validation_fraction=0.3) for s in ("train", "validation"))
    assert len(train) + len(held) == 30 and 3 < len(held) < 18 and train.class_names == ("a", "b")
    for part in (train, held):
        for i, (path, label) in enumerate(part.files):
            number = int(path.stem)
            image, found = part.example(i)
            assert found == label == number % 2 and image.shape == (5, 4, 1 if number % 3 == 0 else 3)
            np.testing.assert_array_equal(image[..., :1], PIXELS[number])
    before = [path for path, _ in held.files]
    (folder / "a" / "98.png").write_bytes((folder / "a" / "00.png").read_bytes())
    again = open_images(str(folder), "validation", validation_fraction=0.3)
    assert [path for path, _ in again.files if path.stem != "98"] == before  # a new file moves no other
    assert again.fingerprint != held.fingerprint or len(again) == len(held)


def test_a_folder_with_parts_of_its_own_keeps_them(folder, tmp_path):
    (tmp_path / "parts").mkdir()
    folder.rename(tmp_path / "parts" / "train")
    held = tmp_path / "parts" / "val" / "b"
    held.mkdir(parents=True)
    held.joinpath("x.png").write_bytes((tmp_path / "parts" / "train" / "b" / "01.png").read_bytes())
    train, val = (open_images(str(tmp_path / "parts"), s) for s in ("train", "validation"))
    assert (len(train), len(val)) == (30, 1) and val.example(0)[1] == 1
    (tmp_path / "parts" / "val" / "c").mkdir()
    refused(tmp_path / "parts", "the class 'c'", split="validation")


def test_a_broken_image_is_named_or_replaced_by_the_next_one(folder):
    train = open_images(str(folder), "train", validation_fraction=0.2)
    broken = train.files[3][0]
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(InputError, match=str(broken)) as caught:
        train.example(3)
    assert "data.on_broken=skip" in str(caught.value) and "\n" not in str(caught.value)
    lenient = open_images(str(folder), "train", validation_fraction=0.2, on_broken="skip")
    for _ in range(2):
        image, label = lenient.example(3)
        np.testing.assert_array_equal(image, lenient.example(4)[0])
        assert label == lenient.files[4][1]
    assert lenient.broken == [str(broken)]
    for path, _ in lenient.files:
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"none of its .* images can be read"):
        lenient.example(0)


def test_sixteen_bits_are_scaled_and_not_cut(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    values = np.array([[0, 257, 4096], [30000, 61440, 65535]], np.uint16)
    image.fromarray(values).save(tmp_path / "a" / "x.png")
    found, _ = open_images(str(tmp_path), "all").example(0)
    np.testing.assert_array_equal(found[..., 0], [[0, 1, 16], [117, 239, 255]])


def test_a_folder_without_classes_or_images_is_told(tmp_path):
    (tmp_path / "half" / "val" / "a").mkdir(parents=True)
    refused(tmp_path / "half", "has val but no train")
    (tmp_path / "half" / "val" / "a").rmdir()
    (tmp_path / "half" / "val").rmdir()
    (tmp_path / "half").rmdir()
    refused(tmp_path, "no folders of classes")
    (tmp_path / "a").mkdir()
    refused(tmp_path, "no image for train", "CLASS/*.png")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A TFDS folder with a small data set of images, and one of latents, written without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("tfds")

    def png(pixels):
        file = io.BytesIO()
        image.fromarray(pixels[..., 0]).save(file, "png")
        file.seek(0)
        return file

    def make(name, features, examples, splits):
        class Small(tfds.core.GeneratorBasedBuilder):
            """Made for a test."""

            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, manager):
                return {split: self._generate_examples(rows) for split, rows in splits.items()}

            def _generate_examples(self, rows):
                for i in rows:
                    yield i, examples(i)

        Small.name = name
        Small(data_dir=str(folder), file_format="array_record").download_and_prepare()

    with tfds.core.registered.skip_registration():
        kinds = {"image": tfds.features.Image(shape=(5, 4, 1)), "label": tfds.features.ClassLabel(num_classes=3)}
        make("tiny_images", kinds, lambda i: {"image": png(PIXELS[i]), "label": int(LABELS[i])},
             {"train": range(24), "test": range(24, 30)})  # fmt: skip
        kinds = {
            "latent": tfds.features.Tensor(shape=(2, 2, 4), dtype=np.float32),
            "label": tfds.features.ClassLabel(num_classes=3),
        }
        make("tiny_latents", kinds, lambda i: {"latent": np.full((2, 2, 4), i, np.float32), "label": i % 3},
             {"train": range(20)})  # fmt: skip
        make("tiny_text", {"text": tfds.features.Text()}, lambda i: {"text": str(i)}, {"train": range(3)})
    return folder


def test_tfds_is_read_at_random_places(prepared):
    train, test = (open_images("tfds:tiny_images", s, data_dir=str(prepared)) for s in ("train", "validation"))
    assert (len(train), len(test), train.num_classes) == (24, 6, 3)
    # TFDS shuffles what it writes.
    found = sorted(bytes(train.example(i)[0].data) for i in range(24))
    assert found == sorted(bytes(image.data) for image in PIXELS[:24])
    by_bytes = {bytes(image.data): label for image, label in zip(PIXELS, LABELS, strict=True)}
    image, label = test.example(3)
    assert label == by_bytes[bytes(image.data)] and train.fingerprint != test.fingerprint
    direct = open_images(str(prepared / "tiny_images" / "1.0.0"), "train")
    np.testing.assert_array_equal(direct.example(5)[0], train.example(5)[0])


def test_broken_files_of_tfds_are_told(prepared, tmp_path):
    """An example that cannot be decoded is named, or the next one taken; broken descriptions end in one line."""
    copy = tmp_path / "tiny_images" / "1.0.0"
    shutil.copytree(prepared / "tiny_images" / "1.0.0", copy)
    found = open_images(str(copy), "train", on_broken="skip")
    whole = found._source

    class Holed:
        def __getitem__(self, place):
            if place == 2:
                raise OSError("Truncated File Read")
            return whole[place]

    found._source = Holed()
    np.testing.assert_array_equal(found.example(2)[0], found.example(3)[0])
    assert found.broken == [f"{copy} train, example 2"]
    found.on_broken = "stop"
    with pytest.raises(
        InputError, match=r"example 2 cannot be read as an image \(Truncated File Read\).*on_broken"
    ):
        found.example(2)
    shard = next(copy.glob("*train*array_record*"))
    shard.rename(tmp_path / "elsewhere")
    refused(copy, "cannot be read")
    (copy / "dataset_info.json").write_text("{")
    refused(copy, "is not a prepared data set")


def test_latents_of_tfds_are_parted_where_there_is_one_split(prepared):
    folder = str(prepared / "tiny_latents" / "1.0.0")
    parts = [open_images(folder, s, validation_fraction=0.3) for s in ("train", "validation")]
    values = [int(part.example(i)[0][0, 0, 0]) for part in parts for i in range(len(part))]
    assert sorted(values) == list(range(20)) and len(parts[1]) > 1 and not parts[0].shows_pixels


def test_tfds_that_cannot_be_read_is_told_at_once(prepared):
    began = time.monotonic()
    refused("tfds:cifar10", "not prepared", "download_and_prepare()", str(prepared), data_dir=str(prepared))
    refused("tfds:cifar1", "'cifar1'", "nearest: cifar10", data_dir=str(prepared))
    refused(prepared / "tiny_text" / "1.0.0", "has the features text", "needs image (or latent) and label")
    assert time.monotonic() - began < 60  # asked for its data it would try to download them for minutes
