"""Keeps what a worker learned of its step times across restarts of its engine: one small file beside the plugin's socket.

Written on a thread of its own, never on the scheduler's, at most every SAVE_EVERY_S. A file that is damaged, or was made by
another engine version, model, tensor-parallel size, device or way of lending, is left aside: learning begins anew.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidecar.plugin.settings import PluginSettings
from sidecar.plugin.steps import StepModel

log = logging.getLogger(__name__)

FORMAT = 1
SAVE_EVERY_S = 10.0
_MOST_BYTES = 1024 * 1024
_TRIES = 20
_TRY_AGAIN_S = 0.002


class StepsFile:
    """One per engine: of tensor-parallel ranks only the first one decides, so only its model is kept."""

    def __init__(self, path: Path, model: StepModel, made_by: Mapping[str, str]) -> None:
        self.path, self._model, self._made_by = path, model, dict(made_by)
        self._saved: tuple[int, int] | None = None
        self._is_failing = False
        self._over = threading.Event()

    @staticmethod
    def path_of(settings: PluginSettings) -> Path:
        """`w1.sock` -> `w1.steps.json`, in the folder that a person named or in the socket's."""
        socket = Path(settings.socket_path)
        return (Path(settings.state_dir) if settings.state_dir else socket.parent) / f"{socket.stem}.steps.json"

    def load(self) -> bool:
        """Take over what stands in the file, before anything is learned. False if there is nothing to take over; never raises."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise ValueError("larger than 1 MiB")
            return self._take(json.loads(raw))
        except FileNotFoundError:
            return False
        except Exception as error:  # whatever stands there must not keep an engine from starting
            log.warning("fluidpd: %s cannot be used (%s); step times are learned anew", self.path, error)
            return False

    def _take(self, found: Any) -> bool:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"not in format {FORMAT}")
        made_by = found.get("made_by")
        if made_by != self._made_by:
            differs = [k for k, v in self._made_by.items() if not isinstance(made_by, dict) or made_by.get(k) != v]
            log.info(
                "fluidpd: step times in %s are of another %s; they are learned anew", self.path, ", ".join(differs) or "kind"
            )
            return False
        fresh = StepModel()
        fresh.decode.restore(found["decode"])  # both or none
        fresh.lent.restore(found["lent"])
        self._model.decode, self._model.lent = fresh.decode, fresh.lent
        log.info("fluidpd: %d decode and %d lent steps taken over from %s", fresh.decode.steps, fresh.lent.steps, self.path)
        return True

    # ------------------------------------------------------------ a thread of its own

    def start(self) -> None:
        threading.Thread(target=self._save_for_ever, name="fluidpd-steps", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _save_for_ever(self) -> None:
        while not self._over.wait(SAVE_EVERY_S):
            self.save()

    def save(self) -> bool:
        """Write what is known by now, whole or not at all. False if nothing is new, or it could not be written; never raises."""
        at = self._model.decode.steps, self._model.lent.steps
        if at == self._saved or not any(fit.is_known for fit in (self._model.decode, self._model.lent)):
            return False
        try:
            state = {"format": FORMAT, "made_by": self._made_by, "decode": self._state("decode"), "lent": self._state("lent")}
            text = json.dumps(state, separators=(",", ":"), allow_nan=False)
            fresh = self.path.with_name(f".{self.path.name}.new")
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, self.path)
        except Exception as error:
            if not self._is_failing:
                log.warning("fluidpd: step times cannot be kept in %s (%s); a restart will learn them anew", self.path, error)
            self._is_failing = True
            return False
        self._saved, self._is_failing = at, False
        return True

    def _state(self, regime: str) -> dict[str, object]:
        """A state between two steps: the scheduler's thread goes on learning and is not asked to wait."""
        for _ in range(_TRIES):
            if (found := getattr(self._model, regime).state()) is not None:
                assert isinstance(found, dict)
                return found
            self._over.wait(_TRY_AGAIN_S)
        raise TimeoutError("steps are learned faster than they can be read")
