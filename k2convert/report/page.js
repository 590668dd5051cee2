"use strict";
// Shows the value of the heat map cell under the pointer. Values are hundredths of a dB, little-endian: 0 none, 65535 exact.
(() => {
  const readout = document.getElementById("readout");
  const cells = JSON.parse(document.getElementById("cells").textContent);
  const values = {};
  for (const [name, map] of Object.entries(cells)) {
    const bytes = Uint8Array.from(atob(map.values), (c) => c.charCodeAt(0));
    values[name] = new DataView(bytes.buffer);
  }
  const show = (image, name, isTurned, event) => {
    const box = image.getBoundingClientRect();
    const { layers, experts } = cells[name];
    const across = (event.clientX - box.left) / box.width;
    const down = (event.clientY - box.top) / box.height;
    const [row, column] = isTurned ? [across, down] : [down, across];
    const layer = Math.min(layers.length - 1, Math.max(0, Math.floor(row * layers.length)));
    const expert = Math.min(experts - 1, Math.max(0, Math.floor(column * experts)));
    const value = values[name].getUint16(2 * (layer * experts + expert), true);
    const text = value === 0 ? "no tensor" : value === 65535 ? "exact" : (value / 100).toFixed(2) + " dB";
    readout.textContent = `layer ${layers[layer]}, expert ${expert}, ${name}: ${text}`;
  };
  for (const image of document.querySelectorAll("image[id^=map-]")) {
    const [, name, turned] = image.id.split("-");
    const listener = (event) => show(image, name, turned === "turned", event);
    image.addEventListener("pointermove", listener);
    image.addEventListener("pointerdown", listener);
    readout.textContent = "Point at a cell to read it.";
  }
  document.documentElement.dataset.ready = "yes";
})();
