// Browsers start no worker for a page that is a file. Search then runs in a frame, which has the worker's interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), waiting = [];
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const deliver = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = (data) => deliver(this, data);
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      const load = (each) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: each, onload: done, onerror: failed });
        inside.document.head.append(script);
      });
      this.postMessage = (data) => (waiting.ready ? deliver(inside, data) : waiting.push(data));
      load(url).then(() => { waiting.ready = true; waiting.forEach((data) => deliver(inside, data)); });
    }
  };
}
