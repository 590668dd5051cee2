"use strict";
// Shows the value of the heat map cell under the pointer, or of the cell that the arrow keys moved to.
// Values are hundredths of a dB, little-endian: 0 none, 65535 exact.
(() => {
  const readout = document.getElementById("readout");
  const cursor = document.getElementById("cursor");
  const cells = JSON.parse(document.getElementById("cells").textContent);
  for (const map of Object.values(cells)) {
    map.view = new DataView(Uint8Array.from(atob(map.values), (c) => c.charCodeAt(0)).buffer);
  }
  const clamp = (number, count) => Math.min(count - 1, Math.max(0, Math.floor(number)));
  const show = (name, layer, expert) => {
    const { layers, experts, view } = cells[name];
    const value = view.getUint16(2 * (layer * experts + expert), true);
    const text = value === 0 ? "no tensor" : value === 65535 ? "exact" : (value / 100).toFixed(2) + " dB";
    readout.textContent = `layer ${layers[layer]}, expert ${expert}, ${name}: ${text}`;
  };
  const point = (image, name, event) => {
    const box = image.getBoundingClientRect();
    const { layers, experts } = cells[name];
    const across = (event.clientX - box.left) / box.width;
    const down = (event.clientY - box.top) / box.height;
    show(name, clamp(across * layers.length, layers.length), clamp(down * experts, experts));
  };
  const frame = (image, row, column, rows, columns) => {
    const box = image.getBoundingClientRect();
    const outer = cursor.parentElement.getBoundingClientRect();
    cursor.style.left = `${box.left - outer.left + (column / columns) * box.width}px`;
    cursor.style.top = `${box.top - outer.top + (row / rows) * box.height}px`;
    cursor.style.width = `${box.width / columns}px`;
    cursor.style.height = `${box.height / rows}px`;
    cursor.hidden = false;
  };
  const addKeys = (image, name) => {
    const { layers, experts } = cells[name];
    let [row, column] = [0, 0];
    const go = (newRow, newColumn) => {
      [row, column] = [clamp(newRow, experts), clamp(newColumn, layers.length)];
      frame(image, row, column, experts, layers.length);
      show(name, column, row);
    };
    image.addEventListener("focus", () => go(row, column));
    image.addEventListener("blur", () => { cursor.hidden = true; });
    image.addEventListener("keydown", (event) => {
      const steps = {
        ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1],
        ArrowRight: [row, column + 1], PageUp: [row - 10, column], PageDown: [row + 10, column],
        Home: [row, 0], End: [row, layers.length - 1],
      };
      if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(...steps[event.key]);
    });
  };
  for (const image of document.querySelectorAll("image[id^=map-]")) {
    const name = image.id.slice("map-".length);
    const listener = (event) => point(image, name, event);
    image.addEventListener("pointermove", listener);
    image.addEventListener("pointerdown", listener);
    addKeys(image, name);
    readout.textContent = "Point at a cell to read it, or press Tab and then the arrow keys.";
  }
  document.documentElement.dataset.ready = "yes";
})();
