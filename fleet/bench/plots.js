// Draws the plots of a report from the data in it.

import { chart } from "./chart.js";
import { byId } from "./dom.js";
import { seconds } from "./format.js";

const WITHIN = (x) => `within ${seconds(x)}`;
const AFTER = (x) => `after ${seconds(x)}`;

for (const { place, title, lines, x, y, isOverTime, ...given } of JSON.parse(byId("data").textContent)) {
  const drawn = chart(title, lines, { x, y, height: 220, when: isOverTime ? AFTER : WITHIN });
  byId(place).append(drawn.element);
  drawn.update(given);
}
