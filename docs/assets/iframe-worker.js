// Search in pages that are opened from a folder: browsers start no worker of a file, so its script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      // What the script posts goes to this object, and not to the frame's own window.
      inner.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      const load = src => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src, onload: resolve, onerror: reject })
        inner.document.body.append(script)
      })
      inner.importScripts = (...all) => all.reduce((before, src) => before.then(() => load(src)), Promise.resolve())
      this.loaded = load(new URL(url, location).href)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
