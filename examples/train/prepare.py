"""Makes the data: first-person clips rendered by VizDoom, or a folder of images by class.

    pip install vizdoom                                   # MIT; brings the free maps of Freedoom
    python -m examples.train.prepare video examples/train/data/video.safetensors
    python -m examples.train.prepare image examples/train/data/image.safetensors --images FOLDER

FOLDER holds train/CLASS/*.jpg and validation/CLASS/*.jpg; the latter, and test/ where it is there, are held out.
A contact sheet is written beside the file: look at it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from examples.train.data import Clip, DataError, write_clips
from examples.train.errors import said_plainly

VIDEO_SIDE = 128
IMAGE_SIDE = 144  # a little more than the model's 128: crops are drawn from it
CLIP_FRAMES = 48
TICS_PER_FRAME = 3  # of 35 a second
NEAR = 6.0  # of VizDoom's depth, which ends at 255
MOST_WALLS = CLIP_FRAMES // 4
HELD_OUT_SHARE = 0.08
SHOWN = 8  # columns and rows of the contact sheet

Frame = NDArray[np.uint8]


@dataclass(frozen=True)
class Scene:
    """A map to walk through."""

    name: str
    file: str  # of VizDoom's scenarios, or one of the two games of Freedoom
    map: str


SCENES = (
    Scene("my way home", "my_way_home.wad", "map01"),
    Scene("health gathering", "health_gathering_supreme.wad", "map01"),
    Scene("deathmatch", "deathmatch.wad", "map01"),
    Scene("freedoom 1, E1M1", "freedoom1.wad", "E1M1"),
    Scene("freedoom 1, E2M1", "freedoom1.wad", "E2M1"),
    Scene("freedoom 2, map 1", "freedoom2.wad", "map01"),
)


class Walker:
    """Wanders: turns smoothly, towards the side that is open where something stands in the way."""

    def __init__(self, game: Any, seed: int) -> None:
        self.game, self.random = game, random.Random(seed)
        self.turn, self.turning_left = 0.0, 0

    def step(self) -> None:
        left, ahead, right = self._room()
        if ahead < NEAR and self.turning_left == 0:
            self.turn = 7.0 if right > left else -7.0
            self.turning_left = self.random.randint(3, 8)
        elif self.turning_left == 0:
            self.turn = self.random.choice((0.0, self.random.uniform(-3, 3)))
            self.turning_left = self.random.randint(4, 16)
        self.turning_left -= 1
        speed = 4.0 if ahead < NEAR else 14.0
        self.game.make_action([self.turn, speed, float(self.random.random() < 0.1)], TICS_PER_FRAME)

    def faces_a_wall(self) -> bool:
        return self._room()[1] < NEAR

    def _room(self) -> tuple[float, float, float]:
        """How far one can see to the left, ahead and to the right, at the height of the eyes."""
        depth = self.game.get_state().depth_buffer
        middle = depth[depth.shape[0] * 2 // 5 : depth.shape[0] * 3 // 5]
        left, ahead, right = (float(part.mean()) for part in np.array_split(middle, 3, axis=1))
        return left, ahead, right

    def frame(self) -> Frame:
        """The middle of the screen, as a square."""
        screen = Image.fromarray(self.game.get_state().screen_buffer)
        edge = (screen.width - screen.height) // 2
        square = screen.crop((edge, 0, edge + screen.height, screen.height))
        return np.asarray(square.resize((VIDEO_SIDE, VIDEO_SIDE), Image.Resampling.LANCZOS))


def opened(scene: Scene, seed: int) -> Any:
    """The game, without monsters, weapon and status bar."""
    import vizdoom

    game = vizdoom.DoomGame()
    package = Path(vizdoom.__file__).parent
    if scene.file.startswith("freedoom"):
        game.set_doom_game_path(str(package / scene.file))
    else:
        game.set_doom_scenario_path(str(package / "scenarios" / scene.file))
    game.set_doom_map(scene.map)
    game.set_doom_config_path(str(Path(tempfile.gettempdir()) / "vizdoom.ini"))  # else it is left in this folder
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    for hide in (game.set_render_hud, game.set_render_weapon, game.set_render_crosshair, game.set_render_messages):
        hide(False)
    button = vizdoom.Button
    game.set_available_buttons([button.TURN_LEFT_RIGHT_DELTA, button.MOVE_FORWARD_BACKWARD_DELTA, button.USE])
    game.set_depth_buffer_enabled(True)
    game.set_window_visible(False)
    game.set_episode_timeout(0)
    game.set_seed(seed)
    game.add_game_args("-nomonsters +sv_cheats 1")
    game.init()
    game.send_game_command("god")  # some floors hurt
    return game


def walk(scene: Scene, clips: int, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Clips of CLIP_FRAMES frames, with an unseen stretch before each; few of their frames show nothing but a wall."""
    game = opened(scene, seed)
    found = 0
    try:
        for attempt in range(30 * clips):
            if attempt % 6 == 0 or game.is_episode_finished():  # some maps start somewhere else each time
                game.new_episode()
                game.send_game_command("god")
            frames = _clip(Walker(game, seed * 1000 + attempt))
            if frames is not None:
                yield frames
                found += 1
            if found == clips:
                return
        raise DataError(f"only {found} of {clips} clips of {scene.name} could be found; ask for fewer.")
    finally:
        game.close()


def _clip(walker: Walker) -> NDArray[np.uint8] | None:
    """The frames of a walk, or None where it shows too many walls or comes to the end of the map."""
    frames, walls = [], 0
    unseen = walker.random.randint(10, 60)
    for number in range(unseen + CLIP_FRAMES):
        walker.step()
        if walker.game.is_episode_finished():
            return None
        if number >= unseen:
            frames.append(walker.frame())
            walls += walker.faces_a_wall()
    return np.stack(frames) if walls <= MOST_WALLS else None


def video_clips(clips_per_scene: int, seed: int) -> list[Clip]:
    return [
        Clip(frames, label, held_out=number < max(1, round(HELD_OUT_SHARE * clips_per_scene)))
        for label, scene in enumerate(SCENES)
        for number, frames in enumerate(walk(scene, clips_per_scene, seed + label))
    ]


def image_clips(folder: Path) -> tuple[list[Clip], list[str]]:
    classes = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    if not classes:
        raise DataError(f"{folder} has no folder train/CLASS.")
    clips = []
    for part in ("train", "validation", "test"):
        for label, name in enumerate(classes):
            for path in sorted((folder / part / name).glob("*.jp*g")):
                clips.append(Clip(_square(path)[None], label, held_out=part != "train"))
    return clips, classes


def _square(path: Path) -> Frame:
    with Image.open(path) as picture:
        upright = ImageOps.exif_transpose(picture).convert("RGB")
    return np.asarray(ImageOps.fit(upright, (IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.LANCZOS))


def contact_sheet(clips: list[Clip], path: Path) -> None:
    """A clip a row, or many images."""
    chosen = random.Random(0).sample(clips, min(len(clips), SHOWN if len(clips[0].frames) > 1 else SHOWN * SHOWN))
    frames = [clip.frames[at] for clip in chosen for at in np.linspace(0, len(clip.frames) - 1, SHOWN).astype(int)]
    if len(clips[0].frames) == 1:
        frames = [clip.frames[0] for clip in chosen]
    rows = [np.concatenate(frames[start : start + SHOWN], axis=1) for start in range(0, len(frames), SHOWN)]
    whole = [row for row in rows if row.shape == rows[0].shape]
    Image.fromarray(np.concatenate(whole)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("video", "image"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=20, help="of each map, for video")
    parser.add_argument("--images", type=Path, help="folder of images by class")
    parser.add_argument("--source", help="what the data is and its licence, for the model card")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kind == "video":
        clips, classes = video_clips(options.clips, options.seed), [scene.name for scene in SCENES]
        source = options.source or "rendered by VizDoom (MIT) from its scenarios and the maps of Freedoom (BSD)"
    elif options.images is None:
        parser.error("image needs --images FOLDER.")
    else:
        clips, classes = image_clips(options.images)
        source = options.source or f"images of {options.images.name}"
    write_clips(options.out, clips, classes, source)
    sheet = options.out.with_suffix(".png")
    contact_sheet(clips, sheet)
    size, frames = options.out.stat().st_size / 2**20, sum(len(clip.frames) for clip in clips)
    held_out = sum(clip.held_out for clip in clips)
    print(f"{options.out}: {len(clips)} clips ({held_out} held out), {frames} frames, {size:.1f} MiB; see {sheet}")


if __name__ == "__main__":
    with said_plainly():
        main()
