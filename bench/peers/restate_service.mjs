// Calls as handlers of one durable step on Restate; bench.comparison asks them over the server's ingress.
import http2 from "node:http2";
import * as restate from "@restatedev/restate-sdk";

// Its SDK expects Node 22; this is all that it misses in Node 20.
Promise.withResolvers ??= function () {
  let resolve, reject;
  const promise = new Promise((a, b) => ([resolve, reject] = [a, b]));
  return { promise, resolve, reject };
};

const calls = restate.service({
  name: "calls",
  handlers: {
    call: async (context, request) => context.run("effect", () => ({ ticket_id: "T-1" })),
  },
});

const server = http2.createServer(restate.createEndpointHandler({ services: [calls] }));
server.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}`));
