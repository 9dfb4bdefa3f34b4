"""The operations of the routes that show what the server does, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from virta.server.api.description.operations import (
    COMMON,
    FILTER_WRITING,
    NO_PIPELINE,
    NO_SUBSCRIPTION,
    PIPELINE,
    REJECTED,
    STREAM,
    SUBSCRIPTION_ID,
    TOO_LARGE,
    Answer,
    Operation,
    Parameter,
    json,
    query,
    refusal,
)
from virta.server.api.observe import schemas

HTML = Answer("The page.", {"text/html": None})
READING = {503: refusal("The log cannot be read now.")}
Lines = Annotated[int, Meta(ge=1, le=1000)]
OBSERVING = [
    Operation("GET /stats", "stats", {200: json("Now.", schemas.StatsView)}, summary="What the server does now."),
    Operation(
        "GET /stats/history", "statsHistory", {200: json("At most 300 points.", schemas.FigureHistory)},
        (query("step", Literal[1, 12, 288], "Seconds between points."),),
        summary="Figures of the last five minutes, hour or day.",
    ),
    Operation(
        "GET /stats/stream", "statsStream", {200: STREAM, 503: refusal("Too many streams are open.")},
        summary="A frame `stats` a second, with the members of `now`.",
    ),
    Operation(
        "POST /filters/explain", "explainFilter",
        {200: json("An explanation per event.", schemas.ExplainView), **FILTER_WRITING},
        body=schemas.ExplainBody, summary="Why a filter matches events, or does not.",
    ),
    Operation(
        "POST /filters/standing", "standingFilters", {200: json("Those that hold.", schemas.StandingView), **FILTER_WRITING},
        body=schemas.StandingBody, summary="Which filters of subscribers, registered filters and webhooks an event satisfies.",
    ),
    Operation(
        "POST /filters/count", "countMatches", {200: json("The numbers.", schemas.CountView), **FILTER_WRITING, **READING},
        body=schemas.CountBody, summary="How often a filter would have matched in the past.",
    ),
    Operation(
        "GET /subscribers", "listSubscribers", {200: json("By filter.", schemas.SubscriberPage)},
        (query("channel", str, "Only of this channel."),), summary="Standing queries and who receives them.",
    ),
    Operation(
        "DELETE /subscribers/{id}", "disconnectSubscriber",
        {204: Answer("It is disconnected; it may come back."), 404: refusal("No subscriber has this id.")},
        (Parameter("id", "path", Annotated[str, Meta(min_length=1)], "A client's id."),),
    ),
    Operation("GET /health", "health", {200: json("Worst check first.", schemas.HealthView), **READING}),
    Operation(
        "POST /health/verify", "verifyLog",
        {200: json("What was found.", schemas.VerifyView), 409: refusal("It is being verified already."), **READING},
        summary="Check every checksum of the log.",
    ),
    Operation(
        "GET /subscriptions/{id}/dead-letters", "deadLetters",
        {200: json("Newest first.", schemas.DeadLetterPage), **NO_SUBSCRIPTION, **READING}, (SUBSCRIPTION_ID,),
    ),
    Operation(
        "POST /subscriptions/{id}/redeliver", "redeliver",
        {200: json("By offset.", schemas.RedeliverView), **TOO_LARGE, **NO_SUBSCRIPTION, **READING},
        (SUBSCRIPTION_ID,), body=schemas.RedeliverBody, summary="Send dead letters again, once each.",
    ),
    Operation(
        "POST /subscriptions/{id}/test", "testSubscription",
        {200: json("What the sink answered.", schemas.SendResult), **NO_SUBSCRIPTION},
        (SUBSCRIPTION_ID,), summary="Send a test event to the sink, once.",
    ),
    Operation("GET /pipelines/{name}/graph", "pipelineGraph", {200: json("Its steps.", schemas.PipelineGraph), **NO_PIPELINE}, (PIPELINE,)),
    Operation(
        "GET /pipelines/{name}/log", "pipelineLog", {200: json("The last lines.", schemas.PipelineLog), **NO_PIPELINE},
        (PIPELINE, query("lines", Lines, "At most so many.")),
    ),
    Operation(
        "GET /captures", "listCaptures", {200: json("All of --cdc.", list[schemas.CaptureView])},
        summary="The databases that are captured beside the server.",
    ),
    Operation(
        "GET /captures/{name}", "showCapture",
        {200: json("This one.", schemas.CaptureView), 404: refusal("No capture has this name.")},
        (Parameter("name", "path", Annotated[str, Meta(min_length=1)], "A capture's name."),),
    ),
    Operation("GET /", "console", {200: HTML}, errors=REJECTED, summary="The console.", public=True),
    Operation(
        "GET /console/{path}", "consoleFile", {200: Answer("The file."), 400: COMMON[400], 404: refusal("There is no such file.")},
        (Parameter("path", "path", str, "A file of the console."),), errors=REJECTED, public=True,
    ),
]  # fmt: skip
